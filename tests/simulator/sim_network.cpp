#include "simulator/sim_network.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace tessera::simulator {

using launch::FileDescriptor;

namespace {

std::pair<FileDescriptor, FileDescriptor> socket_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
    throw std::system_error(errno, std::generic_category(), "socketpair");
  }
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

}  // namespace

// Mostly quick, now and then slow.
Duration SimNetwork::latency() {
  const std::int64_t most = random_.one_in(10) ? 500'000'000 : 2'000'000;
  return Duration(random_.between(50'000, most));
}

FileDescriptor SimNetwork::connect(int host) {
  if (!listener_ || is_lost(host) || is_lost(listener_->host) || random_.one_in(20)) {
    errno = listener_ ? EHOSTUNREACH : ECONNREFUSED;
    return {};
  }
  auto [caller, caller_end] = socket_pair();
  auto [accepted, listener_end] = socket_pair();
  auto link = std::make_unique<Link>();
  link->caller = host;
  link->listener = listener_->host;
  link->caller_end = std::move(caller_end);
  link->listener_end = std::move(listener_end);
  links_.push_back(std::move(link));
  listener_->waiting.push_back({std::move(accepted), "10.0.0." + std::to_string(host + 1)});
  const std::uint64_t one = 1;
  static_cast<void>(!::write(listener_->fd, &one, sizeof(one)));
  return std::move(caller);
}

FileDescriptor SimNetwork::connect_stranger() { return connect(-1); }

// What one side has written goes on its way. Returns whether there was something.
bool SimNetwork::take(FileDescriptor& from, Flow& flow) {
  if (!from.is_open() || flow.has_ended) return false;
  char buffer[8192];
  const ssize_t count = ::recv(from.get(), buffer, sizeof(buffer), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  flow.last = std::max(flow.last, now_ + latency());
  Piece piece{.due = flow.last, .bytes = {}, .is_end = count <= 0};
  if (count > 0) piece.bytes.assign(buffer, static_cast<std::size_t>(count));
  flow.has_ended = piece.is_end;
  if (piece.is_end) from.reset();
  flow.pieces.push_back(std::move(piece));
  return true;
}

bool SimNetwork::bring(Flow& flow, FileDescriptor& to) {
  bool has_moved = false;
  while (!flow.pieces.empty() && flow.pieces.front().due <= now_) {
    has_moved = true;
    Piece& piece = flow.pieces.front();
    if (piece.is_end) {
      to.reset();
      flow.pieces.clear();
      break;
    }
    // Not always whole.
    const std::size_t count =
        random_.one_in(4) ? 1 + random_.below(piece.bytes.size()) : piece.bytes.size();
    if (to.is_open()) {
      static_cast<void>(!::send(to.get(), piece.bytes.data(), count, MSG_NOSIGNAL | MSG_DONTWAIT));
    }
    piece.bytes.erase(0, count);
    if (piece.bytes.empty()) {
      flow.pieces.pop_front();
    } else {
      piece.due = now_ + Duration(random_.between(1000, 1'000'000));
      flow.last = std::max(flow.last, piece.due);
      for (Piece& later : flow.pieces) later.due = std::max(later.due, piece.due);
    }
  }
  return has_moved;
}

bool SimNetwork::move() {
  bool has_moved = false;
  for (const auto& link : links_) {
    if (is_lost(link->caller) || is_lost(link->listener)) {
      // Neither side hears of it, but what it writes must not fill its socket.
      Flow nowhere;
      take(link->caller_end, nowhere);
      nowhere = {};
      take(link->listener_end, nowhere);
      continue;
    }
    has_moved |= take(link->caller_end, link->to_listener);
    has_moved |= take(link->listener_end, link->to_caller);
    has_moved |= bring(link->to_listener, link->listener_end);
    has_moved |= bring(link->to_caller, link->caller_end);
  }
  std::erase_if(links_, [](const auto& link) { return link->is_over(); });
  return has_moved;
}

std::optional<Clock::time_point> SimNetwork::next_moment() const {
  std::optional<Clock::time_point> next;
  for (const auto& link : links_) {
    if (is_lost(link->caller) || is_lost(link->listener)) continue;
    for (const Flow* flow : {&link->to_listener, &link->to_caller}) {
      if (flow->pieces.empty()) continue;
      next = std::min(next.value_or(flow->pieces.front().due), flow->pieces.front().due);
    }
  }
  return next;
}

void SimNetwork::cut(int host) {
  for (const auto& link : links_) {
    if (link->caller != host && link->listener != host) continue;
    link->caller_end.reset();
    link->listener_end.reset();
  }
}

void SimNetwork::stall(int host, Duration duration) {
  for (const auto& link : links_) {
    if (link->caller != host && link->listener != host) continue;
    for (Flow* flow : {&link->to_listener, &link->to_caller}) {
      flow->last = std::max(flow->last, now_ + duration);
      for (Piece& piece : flow->pieces) piece.due = std::max(piece.due, flow->last);
    }
  }
}

void SimNetwork::lose(int host) { lost_.insert(host); }

std::vector<std::string> SimNetwork::hosts_of(int host) {
  constexpr int kCounts[] = {0, 3, 32};
  std::vector<std::string> hosts;
  for (int i = 0; i < kCounts[host % 3]; ++i) {
    hosts.push_back("2001:db8:aaaa:bbbb:cccc:dddd:" + std::to_string(1000 + host) + ":" +
                    std::to_string(1000 + i));
  }
  return hosts;
}

launch::Listener SimWire::listen(const launch::SocketAddress& address) {
  launch::Listener listener;
  listener.fd = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE));
  listener.address = address;
  network_.listener_.emplace();
  network_.listener_->host = host_;
  network_.listener_->fd = listener.fd.get();
  return listener;
}

FileDescriptor SimWire::accept(int listener, std::string& host) {
  // The host has no descriptor left for the next in line, for now.
  if (network_.listener_ && !network_.listener_->waiting.empty() && network_.random_.one_in(16)) {
    errno = EMFILE;
    return {};
  }
  std::uint64_t one = 0;
  if (::read(listener, &one, sizeof(one)) < 0 || !network_.listener_) {
    errno = EAGAIN;
    return {};
  }
  auto waiting = std::move(network_.listener_->waiting.front());
  network_.listener_->waiting.pop_front();
  host = waiting.host;
  return std::move(waiting.socket);
}

FileDescriptor SimWire::connect(const launch::SocketAddress&) { return network_.connect(host_); }

int SimLoop::wait_for_files(std::vector<pollfd>& files, std::chrono::nanoseconds) {
  return num_ready_ = ::poll(files.data(), files.size(), 0);
}

bool SimLoop::serve() {
  const auto next = next_moment();
  const bool has_timer = next && *next <= now();
  num_ready_ = 0;
  run_once(Duration(0));
  return num_ready_ > 0 || has_timer;
}

}  // namespace tessera::simulator
