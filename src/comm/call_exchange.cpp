#include "comm/call_exchange.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <thread>
#include <utility>

#include "comm/member.h"
#include "tessera/comm/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLookEvery = std::chrono::milliseconds(20);
constexpr std::uint64_t kMagic = 0x736c6c6163737374;

/// The first that is said on a connection. Whoever does not know the token of the one who listens
/// is not of the group.
struct Hello {
  std::uint64_t magic = kMagic;
  char token[32] = {};
  std::int32_t rank = -1;
  std::uint32_t round = 0;
};

std::string key_of(int rank) { return "calls/" + std::to_string(rank); }

// How many bytes went, 0 if none can go at present.
std::size_t write_some(const Socket& socket, int peer, const void* data, std::size_t bytes) {
  const ssize_t written = ::send(socket.get(), data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (written >= 0) return static_cast<std::size_t>(written);
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
  throw ConnectionLost("the connection to rank " + std::to_string(peer) +
                       " says: " + std::strerror(errno) + ".");
}

std::size_t read_some(const Socket& socket, int peer, void* data, std::size_t bytes) {
  const ssize_t read = ::recv(socket.get(), data, bytes, MSG_DONTWAIT);
  if (read > 0) return static_cast<std::size_t>(read);
  if (read < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
  throw ConnectionLost("the connection from rank " + std::to_string(peer) +
                       " says: " + (read == 0 ? "It was closed" : std::strerror(errno)) + ".");
}

}  // namespace

CallExchange::CallExchange(c10d::Store& store, int rank, int size, const std::string& address,
                           std::chrono::milliseconds limit)
    : rank_(rank), size_(size), limit_(limit) {
  std::size_t num_rounds = 0;
  while ((1 << num_rounds) < size_) ++num_rounds;
  if (num_rounds == 0) return;
  for (std::size_t round = 0; round < num_rounds; ++round) targets_.emplace_back();
  sources_.resize(num_rounds);
  const auto deadline = Clock::now() + limit;
  const Socket listener = listen_on_free_port(address);
  const std::string token = random_token();
  std::ostringstream place;
  place << address << ' ' << port_of(listener) << ' ' << token;
  store.set(key_of(rank_), place.str());
  // A connection stands before it is accepted, so all ranks may connect first.
  connect(store, deadline);
  accept(listener, token, deadline);
}

void CallExchange::throw_missing(std::vector<int> missing) const {
  std::sort(missing.begin(), missing.end());
  std::ostringstream seconds;
  seconds << static_cast<double>(limit_.count()) / 1000;
  throw Error(ErrorKind::kRendezvous, missing,
              "comm.init: " + list_ranks(missing) + " of " + std::to_string(size_) +
                  " did not connect to rank " + std::to_string(rank_) + " within " + seconds.str() +
                  " s. Look whether they live, whether all have the same "
                  "TESSERA_CHECK_COLLECTIVES, and whether the network lets them through.");
}

void CallExchange::connect(c10d::Store& store, Moment deadline) {
  for (std::size_t round = 0; round < targets_.size(); ++round) {
    const int peer = target_of(round);
    auto pause = std::chrono::microseconds(50);
    while (!store.check({key_of(peer)})) {
      if (Clock::now() >= deadline) throw_missing({peer});
      std::this_thread::sleep_for(pause);
      pause = std::min<std::chrono::microseconds>(pause * 2, std::chrono::milliseconds(10));
    }
    std::istringstream place(store.get_to_str(key_of(peer)));
    std::string host;
    std::uint16_t port = 0;
    std::string token;
    place >> host >> port >> token;
    targets_[round].socket = connect_to(host, port, deadline);
    Hello hello;
    hello.rank = rank_;
    hello.round = static_cast<std::uint32_t>(round);
    token.copy(hello.token, sizeof(hello.token));
    // Nothing has been sent yet, so there is room for all of it.
    if (::send(targets_[round].socket.get(), &hello, sizeof(hello), MSG_NOSIGNAL) !=
        sizeof(hello)) {
      throw_missing({peer});
    }
  }
}

void CallExchange::accept(const Socket& listener, const std::string& token, Moment deadline) {
  Hello expected;
  token.copy(expected.token, sizeof(expected.token));
  struct Guest {
    Socket socket;
    Hello hello;
    std::size_t num_read = 0;
  };
  std::vector<Guest> guests;
  std::size_t num_missing = sources_.size();
  // Whether the guest may stay: it has more to say, or is somebody we wait for.
  const auto hear = [&](Guest& guest) {
    auto* const place = reinterpret_cast<char*>(&guest.hello) + guest.num_read;
    const ssize_t read =
        ::recv(guest.socket.get(), place, sizeof(Hello) - guest.num_read, MSG_DONTWAIT);
    if (read < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    guest.num_read += static_cast<std::size_t>(read);
    if (read == 0) return false;
    if (guest.num_read < sizeof(Hello)) return true;
    const Hello& hello = guest.hello;
    const bool is_known = hello.magic == kMagic &&
                          std::equal(hello.token, std::end(hello.token), expected.token) &&
                          hello.round < sources_.size() && hello.rank == source_of(hello.round) &&
                          !sources_[hello.round];
    if (is_known) {
      send_without_delay(guest.socket);
      sources_[hello.round] = std::move(guest.socket);
      --num_missing;
    }
    return false;
  };
  while (num_missing > 0) {
    if (Clock::now() >= deadline) {
      std::vector<int> missing;
      for (std::size_t round = 0; round < sources_.size(); ++round) {
        if (!sources_[round]) missing.push_back(source_of(round));
      }
      throw_missing(std::move(missing));
    }
    std::vector<pollfd> requests{{.fd = listener.get(), .events = POLLIN, .revents = 0}};
    for (const Guest& guest : guests) {
      requests.push_back({.fd = guest.socket.get(), .events = POLLIN, .revents = 0});
    }
    ::poll(requests.data(), requests.size(), static_cast<int>(kLookEvery.count()));
    std::vector<Guest> staying;
    for (Guest& guest : guests) {
      if (hear(guest)) staying.push_back(std::move(guest));
    }
    guests = std::move(staying);
    while (true) {
      Socket socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) break;
      guests.push_back({std::move(socket), {}, 0});
    }
  }
}

void CallExchange::announce(std::span<const std::byte> mine) noexcept {
  if (targets_.empty()) return;
  try {
    Outlet& target = targets_[0];
    std::uint64_t end = 0;
    {
      const std::lock_guard lock(target.mutex);
      target.waiting.insert(target.waiting.end(), mine.begin(), mine.end());
      end = target.num_put += mine.size();
      target.ends.push_back(end);
    }
    flush(0, end);
  } catch (const ConnectionLost&) {
    // The exchange finds it too, and somebody waits for that.
  }
}

std::uint64_t CallExchange::put(std::size_t round, std::span<const std::byte> bytes) {
  Outlet& target = targets_[round];
  const std::lock_guard lock(target.mutex);
  if (!target.ends.empty()) {
    const std::uint64_t end = target.ends.front();
    target.ends.pop_front();
    return end;
  }
  target.waiting.insert(target.waiting.end(), bytes.begin(), bytes.end());
  return target.num_put += bytes.size();
}

bool CallExchange::flush(std::size_t round, std::uint64_t end) {
  Outlet& target = targets_[round];
  const std::lock_guard lock(target.mutex);
  if (!target.waiting.empty()) {
    const std::size_t written =
        write_some(target.socket, target_of(round), target.waiting.data(), target.waiting.size());
    target.waiting.erase(target.waiting.begin(),
                         target.waiting.begin() + static_cast<std::ptrdiff_t>(written));
  }
  // Later announcements may wait for the peer to come to them; this exchange does not.
  return target.num_put - target.waiting.size() >= end;
}

void CallExchange::all_gather(std::span<const std::byte> mine, std::byte* all, const Look& look) {
  const std::size_t bytes = mine.size();
  const auto size = static_cast<std::size_t>(size_);
  blocks_.resize(bytes * size);
  std::copy(mine.begin(), mine.end(), blocks_.begin());
  // Each round doubles what is known: the records of this rank and of those after it.
  std::size_t num_known = 1;
  for (std::size_t round = 0; num_known < size; ++round) {
    const std::size_t num_records = std::min(num_known, size - num_known);
    pass(round, num_known, num_records, bytes, look);
    num_known += num_records;
  }
  for (std::size_t i = 0; i < size; ++i) {
    const std::size_t owner = (static_cast<std::size_t>(rank_) + i) % size;
    std::copy_n(blocks_.begin() + static_cast<std::ptrdiff_t>(i * bytes), bytes,
                all + owner * bytes);
  }
}

void CallExchange::pass(std::size_t round, std::size_t num_known, std::size_t num_records,
                        std::size_t bytes, const Look& look) {
  const std::size_t length = num_records * bytes;
  const Socket& target = targets_[round].socket;
  const Socket& source = sources_[round];
  std::byte* in = blocks_.data() + num_known * bytes;
  const std::uint64_t end = put(round, {blocks_.data(), length});
  bool is_sent = false;
  std::size_t received = 0;
  auto next_look = Clock::now() + kLookEvery;
  while (true) {
    is_sent = is_sent || flush(round, end);
    if (received < length) {
      received += read_some(source, source_of(round), in + received, length - received);
    }
    const bool is_received = received == length;
    if (is_sent && is_received) return;
    pollfd requests[2];
    nfds_t num_requests = 0;
    if (!is_sent) requests[num_requests++] = {.fd = target.get(), .events = POLLOUT, .revents = 0};
    if (!is_received) {
      requests[num_requests++] = {.fd = source.get(), .events = POLLIN, .revents = 0};
    }
    ::poll(requests, num_requests, static_cast<int>(kLookEvery.count()));
    if (Clock::now() < next_look) continue;
    next_look = Clock::now() + kLookEvery;
    std::vector<int> late;
    for (std::size_t i = num_known + received / bytes; i < static_cast<std::size_t>(size_); ++i) {
      late.push_back((rank_ + static_cast<int>(i)) % size_);
    }
    // What is sent waits for the receiver to read, which it does if it is here.
    if (late.empty()) late.push_back(target_of(round));
    std::sort(late.begin(), late.end());
    look(late);
  }
}

void CallExchange::close() const noexcept {
  for (const Outlet& target : targets_) ::shutdown(target.socket.get(), SHUT_RDWR);
  for (const Socket& socket : sources_) ::shutdown(socket.get(), SHUT_RDWR);
}

}  // namespace tessera::comm
