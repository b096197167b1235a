#include "comm/failure_post.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <sstream>

#include "comm/network.h"

namespace tessera::comm {
namespace {

// Stays under the largest UDP datagram, 65507 bytes.
constexpr std::size_t kMaxLetter = 60000;
constexpr std::size_t kMaxDatagram = 65536;
constexpr int kMostLetters = 64;  // that one call looks at

}  // namespace

FailurePost::FailurePost(const std::string& address, const std::optional<core::Secret>& secret)
    : token_(random_token()) {
  sockaddr_in place{};
  place.sin_family = AF_INET;
  if (token_.empty() || ::inet_pton(AF_INET, address.c_str(), &place.sin_addr) != 1) return;
  socket_ = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (socket_ < 0) return;
  socklen_t length = sizeof(place);
  auto* const raw = reinterpret_cast<sockaddr*>(&place);
  if (::bind(socket_, raw, length) != 0 || ::getsockname(socket_, raw, &length) != 0) {
    ::close(socket_);
    socket_ = -1;
    return;
  }
  std::ostringstream text;
  text << address << ' ' << ntohs(place.sin_port) << ' ' << token_;
  address_ = text.str();
  // The address holds a token that no other post ever had.
  if (secret) letters_.emplace(*secret, token_, address_);
}

FailurePost::~FailurePost() {
  if (socket_ >= 0) ::close(socket_);
}

void FailurePost::send(std::string_view text, const std::vector<std::string>& addresses) noexcept {
  if (socket_ < 0) return;
  try {
    for (const std::string& address : addresses) {
      std::istringstream words(address);
      std::string host;
      std::uint16_t port = 0;
      std::string token;
      words >> host >> port >> token;
      sockaddr_in place{};
      place.sin_family = AF_INET;
      place.sin_port = htons(port);
      if (!words || ::inet_pton(AF_INET, host.c_str(), &place.sin_addr) != 1) continue;
      const std::string letter = letter_for(address, token, text.substr(0, kMaxLetter));
      ::sendto(socket_, letter.data(), letter.size(), MSG_NOSIGNAL,
               reinterpret_cast<const sockaddr*>(&place), sizeof(place));
    }
  } catch (const std::exception&) {
    // Out of memory on the way down; the peers see the connection break.
  }
}

std::string FailurePost::letter_for(const std::string& address, const std::string& token,
                                    std::string_view text) {
  if (letters_) return letters_->seal(address, text);
  return (token + "\n").append(text);
}

std::optional<std::string> FailurePost::open_letter(const std::string& letter) {
  if (letters_) return letters_->open(letter);
  const auto line = letter.find('\n');
  const bool is_ours =
      line != std::string::npos && core::same_bytes(letter.substr(0, line), token_);
  return is_ours ? std::optional(letter.substr(line + 1)) : std::nullopt;
}

std::optional<std::string> FailurePost::receive() {
  if (socket_ < 0) return std::nullopt;
  std::string letter(kMaxDatagram, '\0');
  // Strangers may write faster than anyone reads: the rest waits for the next call.
  for (int i = 0; i < kMostLetters; ++i) {
    const ssize_t length = ::recv(socket_, letter.data(), letter.size(), 0);
    if (length < 0) return std::nullopt;
    if (auto text = open_letter(letter.substr(0, static_cast<std::size_t>(length)))) return text;
  }
  return std::nullopt;
}

}  // namespace tessera::comm
