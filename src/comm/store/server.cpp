#include "comm/store/server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "core/listening.h"
#include "core/own_files.h"

namespace tessera::comm::store {
namespace {

bool is_unix_socket(int socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  return ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
         address.ss_family == AF_UNIX;
}

bool is_own_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         (peer.uid == ::geteuid() || peer.uid == 0);
}

}  // namespace

Server::Server(int listener, core::Secret secret)
    : listener_(listener),
      secret_(std::move(secret)),
      is_local_(is_unix_socket(listener)),
      table_([this](Client id, const Packet& packet) { answer(id, packet); }) {
  core::keep_from_children(listener_);
}

Server::~Server() {
  for (auto& [id, connection] : connections_) ::close(connection.socket);
  ::close(listener_);
}

void Server::run(int stop) {
  std::vector<pollfd> files;
  std::vector<Client> ids;
  while (true) {
    // A negative file is passed over.
    files = {{stop, POLLIN, 0}, {is_accepting() ? listener_ : -1, POLLIN, 0}};
    ids.clear();
    for (auto& [id, connection] : connections_) {
      const short events = connection.session.unsent().empty() ? POLLIN : POLLIN | POLLOUT;
      files.push_back({connection.socket, events, 0});
      ids.push_back(id);
    }
    if (::poll(files.data(), files.size(), milliseconds_to_next()) < 0 && errno != EINTR) return;
    if (files[0].revents != 0) return;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const short ready = files[i + 2].revents;
      Connection& connection = connections_.at(ids[i]);
      if ((ready & POLLOUT) != 0) write_to(connection);
      if ((ready & (POLLIN | POLLHUP | POLLERR)) != 0) read_from(ids[i], connection);
    }
    if (files[1].revents != 0) accept_some();
    for (const Client id : strangers_) {
      Connection& stranger = connections_.at(id);
      if (stranger.deadline > Clock::now()) break;
      stranger.session.end();
    }
    remove_ended();
  }
}

bool Server::is_accepting() const { return Clock::now() >= accepting_from_; }

int Server::milliseconds_to_next() const {
  auto next = Clock::time_point::max();
  if (!is_accepting()) next = accepting_from_;
  if (!strangers_.empty()) next = std::min(next, connections_.at(*strangers_.begin()).deadline);
  if (next == Clock::time_point::max()) return -1;
  const auto left = next - Clock::now();
  const auto milliseconds = std::chrono::ceil<std::chrono::milliseconds>(left).count();
  return static_cast<int>(std::max<std::int64_t>(milliseconds, 0));
}

void Server::accept_some() {
  for (int i = 0; i < core::kMostAccepted && accept_one(); ++i) {
  }
}

// Returns whether there may be more.
bool Server::accept_one() {
  const int socket = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  const bool is_full = socket < 0 && core::is_scarcity(errno);
  if ((is_full || strangers_.size() >= core::kMostStrangers) && !strangers_.empty()) {
    connections_.at(*strangers_.begin()).session.end();
    remove_ended();
  } else if (is_full) {
    // Whoever waits stays in line, and poll would tell of it without a pause.
    accepting_from_ = Clock::now() + core::kPauseOfAccepting;
  }
  if (socket < 0) return false;
  if (is_local_ && !is_own_user(socket)) {
    ::close(socket);
    return true;
  }
  core::keep_from_children(socket);
  if (!is_local_) {
    const int on = 1;
    ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  const Client id = next_id_++;
  Connection connection{.socket = socket,
                        .session = Session(secret_),
                        .deadline = Clock::now() + std::chrono::seconds(core::kHandshakeSeconds)};
  write_to(connection);
  connections_.emplace(id, std::move(connection));
  strangers_.insert(id);
  return true;
}

void Server::read_from(Client id, Connection& connection) {
  if (connection.session.is_over()) return;
  char buffer[64 << 10];
  const ssize_t size = ::recv(connection.socket, buffer, sizeof(buffer), 0);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (size <= 0) {
    connection.session.end();
    return;
  }
  connection.session.receive({buffer, static_cast<std::size_t>(size)},
                             [&](const Packet& request) { table_.serve(id, request); });
  if (connection.session.is_proven()) strangers_.erase(id);
  write_to(connection);
}

void Server::answer(Client id, const Packet& packet) {
  Connection& connection = connections_.at(id);
  connection.session.answer(packet);
  write_to(connection);
}

void Server::write_to(Connection& connection) {
  std::string& unsent = connection.session.unsent();
  while (!unsent.empty()) {
    const ssize_t sent = ::send(connection.socket, unsent.data(), unsent.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      unsent.erase(0, static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN) {
      return;
    } else if (errno != EINTR) {
      connection.session.end();
      return;
    }
  }
}

void Server::remove_ended() {
  for (auto it = connections_.begin(); it != connections_.end();) {
    if (!it->second.session.is_over()) {
      ++it;
      continue;
    }
    table_.forget(it->first);
    strangers_.erase(it->first);
    ::close(it->second.socket);
    it = connections_.erase(it);
  }
}

}  // namespace tessera::comm::store
