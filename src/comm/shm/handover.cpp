#include "comm/shm/handover.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace tessera::comm::shm {

namespace {

constexpr std::size_t kMaxText = 8192;
constexpr int kBacklog = 128;
constexpr std::size_t kNameDigits = 32;

[[noreturn]] void unavailable(const std::string& what, int error) {
  throw Failure(FailureKind::kUnavailable, {},
                "comm.shm: cannot " + what + ": " + std::strerror(error) +
                    ". Set TESSERA_ENGINE=gloo to do without shared memory.");
}

Descriptor make_socket() {
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.get() < 0) unavailable("make a Unix socket", errno);
  return socket;
}

struct Address {
  explicit Address(const std::string& name) {
    // A leading zero byte: the name is the kernel's, in no file system, and ends with its listener.
    const std::string text = std::string(1, '\0') + "tessera-" + name;
    place.sun_family = AF_UNIX;
    std::memcpy(place.sun_path, text.data(), text.size());
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&place); }

  sockaddr_un place{};
  socklen_t length = 0;
};

/// Who is at the other end; see Note [Who is at the other end].
std::optional<ucred> peer_of(int socket) noexcept {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return std::nullopt;
  return peer;
}

bool is_own(const std::optional<ucred>& peer) noexcept { return peer && peer->uid == ::geteuid(); }

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);
}

bool is_listener_name(const std::string& name) noexcept {
  return name.size() == kNameDigits && std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

std::optional<Line> Line::connect(const std::string& name) {
  Descriptor socket = make_socket();
  const Address address(name);
  if (::connect(socket.get(), address.get(), address.length) != 0) {
    if (errno == EAGAIN || errno == EINTR) return std::nullopt;
    unavailable("reach the rank that made the segment", errno);
  }
  const std::optional<ucred> peer = peer_of(socket.get());
  if (!is_own(peer)) {
    throw Failure(
        FailureKind::kAborted, {},
        "comm.shm: the group's segment is offered by " +
            (peer ? "user " + std::to_string(peer->uid) + " (pid " + std::to_string(peer->pid) + ")"
                  : std::string("an unknown user")) +
            ", not by user " + std::to_string(::geteuid()) +
            ": not believable, and nothing of it was used. Run all ranks of a host as one user; "
            "if they are, another user has written into the job's store.");
  }
  return Line(std::move(socket));
}

bool Line::send(const std::string& text, int file) noexcept {
  iovec part{const_cast<char*>(text.data()), std::min(text.size(), kMaxText)};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (file >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), &file, sizeof(int));
  }
  ssize_t sent = -1;
  do {
    sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent >= 0;
}

std::optional<Delivery> Line::receive() {
  Delivery delivery;
  delivery.text.resize(kMaxText);
  iovec part{delivery.text.data(), delivery.text.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t received = -1;
  do {
    received = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received <= 0) {
    has_ended_ = received == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
    return std::nullopt;
  }
  delivery.text.resize(static_cast<std::size_t>(received));
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr;
       head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    int file = -1;
    std::memcpy(&file, CMSG_DATA(head), sizeof(file));
    delivery.file = Descriptor(file);
  }
  return delivery;
}

Listener::Listener() : socket_(make_socket()) {
  std::uint64_t secret[2] = {};
  if (::getrandom(secret, sizeof(secret), 0) != static_cast<ssize_t>(sizeof(secret))) {
    unavailable("get random numbers", errno);
  }
  char digits[kNameDigits + 1];
  std::snprintf(digits, sizeof(digits), "%016" PRIx64 "%016" PRIx64, secret[0], secret[1]);
  name_ = digits;
  const Address address(name_);
  if (::bind(socket_.get(), address.get(), address.length) != 0 ||
      ::listen(socket_.get(), kBacklog) != 0) {
    unavailable("listen on a Unix socket", errno);
  }
}

std::optional<Line> Listener::accept() {
  // A stranger who connects again and again must not hold us here.
  constexpr int kMostStrangers = 64;
  for (int i = 0; i < kMostStrangers; ++i) {
    Descriptor socket(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.get() < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return std::nullopt;
    }
    if (is_own(peer_of(socket.get()))) return Line(std::move(socket));
  }
  return std::nullopt;
}

}  // namespace tessera::comm::shm
