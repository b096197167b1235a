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

}  // namespace

FailurePost::FailurePost(const std::string& address) : token_(random_token()) {
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
}

FailurePost::~FailurePost() {
  if (socket_ >= 0) ::close(socket_);
}

void FailurePost::send(std::string_view text,
                       const std::vector<std::string>& addresses) const noexcept {
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
      std::string letter = token;
      letter.append("\n").append(text.substr(0, kMaxLetter));
      ::sendto(socket_, letter.data(), letter.size(), MSG_NOSIGNAL,
               reinterpret_cast<const sockaddr*>(&place), sizeof(place));
    }
  } catch (const std::exception&) {
    // Out of memory on the way down; the peers see the connection break.
  }
}

std::optional<std::string> FailurePost::receive() const {
  if (socket_ < 0) return std::nullopt;
  char first = 0;
  while (true) {
    const ssize_t length = ::recv(socket_, &first, 1, MSG_PEEK | MSG_TRUNC);
    if (length < 0) return std::nullopt;
    std::string letter(static_cast<std::size_t>(length), '\0');
    const ssize_t read = ::recv(socket_, letter.data(), letter.size(), 0);
    if (read < 0) return std::nullopt;
    const auto line = letter.find('\n');
    if (line == std::string::npos || letter.compare(0, line, token_) != 0) continue;
    return letter.substr(line + 1);
  }
}

}  // namespace tessera::comm
