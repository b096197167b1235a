// src/comm/failure_post.h — tells the reason a group ended from rank to rank, without the store.

#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/letters.h"
#include "core/secret.h"

namespace tessera::comm {

/// A datagram socket on which one rank hears from the others why their group ended. In a job with a
/// secret a letter is sealed for the one who receives it, numbered and signed: one that was made
/// up, changed, repeated or meant for another rank is dropped. In a job without, it must carry the
/// receiver's token, which whoever reads the store knows. Delivery is likely, not certain: it
/// stands in for a store that is gone. Used by one thread at a time.
class FailurePost {
 public:
  /// Listens on a free port of `address` (IPv4, numeric), and on nothing else. If that cannot be
  /// had, the post sends and hears nothing.
  FailurePost(const std::string& address, const std::optional<core::Secret>& secret);
  ~FailurePost();
  FailurePost(const FailurePost&) = delete;
  FailurePost& operator=(const FailurePost&) = delete;

  /// Where to write to this rank: address, port and token, in a form for `send`.
  const std::string& address() const noexcept { return address_; }

  /// Sends `text` to each address. What is longer than a datagram is cut. Never blocks or throws.
  void send(std::string_view text, const std::vector<std::string>& addresses) noexcept;
  /// The next letter for this rank, if one has arrived.
  std::optional<std::string> receive();

 private:
  std::string letter_for(const std::string& address, const std::string& token,
                         std::string_view text);
  std::optional<std::string> open_letter(const std::string& letter);

  int socket_ = -1;
  std::string token_;
  std::string address_;
  std::optional<core::Letters> letters_;  // in a job with a secret
};

}  // namespace tessera::comm
