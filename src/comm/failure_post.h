// src/comm/failure_post.h — tells the reason a group ended from rank to rank, without the store.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

/// A datagram socket on which one rank hears from the others why their group ended. Letters that do
/// not carry this rank's token are dropped, so nobody outside the group is heard. Delivery is
/// likely, not certain: it stands in for a store that is gone. Used by one thread at a time.
class FailurePost {
 public:
  /// Listens on a free port of `address` (IPv4, numeric), and on nothing else. If that cannot be
  /// had, the post sends and hears nothing.
  explicit FailurePost(const std::string& address);
  ~FailurePost();
  FailurePost(const FailurePost&) = delete;
  FailurePost& operator=(const FailurePost&) = delete;

  /// Where to write to this rank: address, port and token, in a form for `send`.
  const std::string& address() const noexcept { return address_; }

  /// Sends `text` to each address. What is longer than a datagram is cut. Never blocks or throws.
  void send(std::string_view text, const std::vector<std::string>& addresses) const noexcept;
  /// The next letter for this rank, if one has arrived.
  std::optional<std::string> receive() const;

 private:
  int socket_ = -1;
  std::string token_;
  std::string address_;
};

}  // namespace tessera::comm
