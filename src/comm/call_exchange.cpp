#include "comm/call_exchange.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include "comm/member.h"
#include "comm/rank_list.h"
#include "core/handshake.h"
#include "tessera/comm/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLookEvery = std::chrono::milliseconds(20);

constexpr std::size_t kMostGuests = 256;  // connections that have not said who they are
constexpr std::chrono::seconds kGreetingLimit{core::kHandshakeSeconds};

/// Who connects, and for which round.
struct Hello {
  std::int32_t rank = -1;
  std::uint32_t round = 0;
};
// Without a secret: this word first, then the token of the one who listens, then the hello.
constexpr std::string_view kMagic("tsscalls", 8);
constexpr std::size_t kToken = 32;
// With one: what each side of the handshake says, and the frame that holds the hello.
constexpr std::size_t kProof = 8 + 32 + 32;
constexpr std::size_t kFrame = 4 + 16 + sizeof(Hello);

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

// How the ranks of one exchange come to be connected: this one calls those it writes to, and is
// called by those it reads from, at the same time.
class CallExchange::Meeting {
 public:
  Meeting(CallExchange& exchange, std::string token, const std::optional<core::Secret>& secret)
      : exchange_(exchange), token_(std::move(token)), secret_(secret) {}

  // Connections stand before they are accepted, so all ranks may connect first.
  void call(c10d::Store& store, Moment deadline) {
    for (std::size_t round = 0; round < exchange_.targets_.size(); ++round) {
      const int peer = exchange_.target_of(round);
      auto pause = std::chrono::microseconds(50);
      while (!store.check({key_of(peer)})) {
        if (Clock::now() >= deadline) exchange_.throw_missing({peer});
        std::this_thread::sleep_for(pause);
        pause = std::min<std::chrono::microseconds>(pause * 2, std::chrono::milliseconds(10));
      }
      std::istringstream place(store.get_to_str(key_of(peer)));
      std::string host;
      std::uint16_t port = 0;
      std::string token;
      place >> host >> port >> token;
      Line line{.socket = reach(host, port, deadline), .peer = peer};
      line.hello = {exchange_.rank_, static_cast<std::uint32_t>(round)};
      if (secret_) {
        line.handshake.emplace(core::Handshake::Side::kConnects, *secret_, purpose(token));
      } else {
        token.resize(kToken, '\0');
        line.unsent.append(kMagic).append(token).append(hello_bytes(line.hello));
        line.is_done = true;
      }
      calls_.push_back(std::move(line));
    }
  }

  void finish(const Socket& listener, Moment deadline) {
    while (true) {
      const std::vector<int> missing = missing_ranks();
      if (missing.empty()) return;
      if (Clock::now() >= deadline) exchange_.throw_missing(missing);
      std::vector<pollfd> requests{{.fd = listener.get(), .events = POLLIN, .revents = 0}};
      for (const auto* lines : {&calls_, &guests_}) {
        for (const Line& line : *lines) {
          const short events = line.unsent.empty() ? POLLIN : POLLIN | POLLOUT;
          if (!line.is_over()) {
            requests.push_back({.fd = line.socket.get(), .events = events, .revents = 0});
          }
        }
      }
      ::poll(requests.data(), requests.size(), static_cast<int>(kLookEvery.count()));
      for (Line& line : calls_) advance_call(line);
      std::erase_if(guests_, [&](Line& line) { return !advance_guest(line); });
      accept(listener);
    }
  }

 private:
  struct Line {
    Socket socket;
    int peer = -1;
    Hello hello;
    std::optional<core::Handshake> handshake = std::nullopt;
    std::string received = {};
    std::size_t num_received = 0;
    std::string unsent = {};
    bool is_done = false;  // nothing more has to be said; some of it may not have gone yet
    Moment deadline{};

    bool is_over() const { return is_done && unsent.empty(); }
  };

  // Who does not listen any more has died, or failed, since it told where.
  static Socket reach(const std::string& host, std::uint16_t port, Moment deadline) {
    try {
      return connect_to(host, port, deadline);
    } catch (const Error& error) {
      throw ConnectionLost(error.what());
    }
  }

  [[noreturn]] void throw_lost(int peer) const {
    throw ConnectionLost("comm.init: rank " + std::to_string(peer) +
                         " has closed its connection to rank " + std::to_string(exchange_.rank_) +
                         ". Look at that rank's own output for the reason.");
  }

  // A proof serves for one listener only.
  static std::string purpose(const std::string& token) { return "calls, " + token; }

  static std::string hello_bytes(const Hello& hello) {
    return {reinterpret_cast<const char*>(&hello), sizeof(hello)};
  }

  // Reads, but nothing that comes after `most` bytes. False: the other side has gone.
  static bool hear(Line& line, std::size_t most) {
    char buffer[kProof + kFrame];
    while (line.num_received < most) {
      const ssize_t count =
          ::recv(line.socket.get(), buffer, most - line.num_received, MSG_DONTWAIT);
      if (count < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
      if (count == 0) return false;
      line.num_received += static_cast<std::size_t>(count);
      line.received.append(buffer, static_cast<std::size_t>(count));
    }
    return true;
  }

  static bool say(Line& line) {
    const ssize_t count = ::send(line.socket.get(), line.unsent.data(), line.unsent.size(),
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) line.unsent.erase(0, static_cast<std::size_t>(count));
    return count >= 0 || errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  }

  void advance_call(Line& line) {
    if (!line.is_done) {
      const bool is_there = hear(line, kProof);
      const auto state = line.handshake->advance(line.received, line.unsent);
      if (state == core::Handshake::State::kProven) {
        line.unsent += line.handshake->writer().frame(hello_bytes(line.hello));
        line.is_done = true;
      } else if (state != core::Handshake::State::kOpen) {
        // Whoever listens there is not the rank, or has another secret.
        exchange_.throw_missing({line.peer});
      } else if (!is_there) {
        throw_lost(line.peer);
      }
    }
    if (!line.unsent.empty() && !say(line)) throw_lost(line.peer);
    if (line.is_over() && line.socket) {
      exchange_.targets_[line.hello.round].socket = std::move(line.socket);
    }
  }

  // Whether the guest may stay: it has more to say.
  bool advance_guest(Line& line) {
    const bool is_there =
        hear(line, secret_ ? kProof + kFrame : kMagic.size() + kToken + sizeof(Hello));
    const std::optional<Hello> hello = secret_ ? proven_hello(line) : plain_hello(line);
    if (!line.unsent.empty() && !say(line)) return false;
    if (!hello) return is_there && !line.is_done && Clock::now() < line.deadline;
    auto& sources = exchange_.sources_;
    if (hello->round < sources.size() && hello->rank == exchange_.source_of(hello->round) &&
        !sources[hello->round]) {
      send_without_delay(line.socket);
      sources[hello->round] = std::move(line.socket);
    }
    return false;
  }

  // `is_done` says that nothing it may say changes anything.
  static std::optional<Hello> proven_hello(Line& line) {
    const auto state = line.handshake->advance(line.received, line.unsent);
    if (state == core::Handshake::State::kOpen) return std::nullopt;
    line.is_done = state != core::Handshake::State::kProven;
    if (line.is_done) return std::nullopt;
    try {
      const auto text = line.handshake->reader().next(line.received, sizeof(Hello));
      if (!text || text->size() != sizeof(Hello)) return std::nullopt;
      Hello hello;
      std::memcpy(&hello, text->data(), sizeof(hello));
      return hello;
    } catch (const core::FrameError&) {
      line.is_done = true;
      return std::nullopt;
    }
  }

  std::optional<Hello> plain_hello(Line& line) const {
    if (line.received.size() < kMagic.size() + kToken + sizeof(Hello)) return std::nullopt;
    line.is_done = true;
    std::string expected(kMagic);
    expected.append(token_).resize(kMagic.size() + kToken, '\0');
    if (!core::same_bytes(std::string_view(line.received).substr(0, expected.size()), expected)) {
      return std::nullopt;
    }
    Hello hello;
    std::memcpy(&hello, line.received.data() + expected.size(), sizeof(hello));
    return hello;
  }

  void accept(const Socket& listener) {
    while (true) {
      Socket socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) return;
      if (guests_.size() == kMostGuests) guests_.erase(guests_.begin());  // the oldest
      Line line{.socket = std::move(socket)};
      line.deadline = Clock::now() + kGreetingLimit;
      if (secret_) {
        line.handshake.emplace(core::Handshake::Side::kListens, *secret_, purpose(token_));
        line.unsent = line.handshake->opening();
      }
      guests_.push_back(std::move(line));
    }
  }

  std::vector<int> missing_ranks() const {
    std::vector<int> missing;
    for (std::size_t round = 0; round < exchange_.sources_.size(); ++round) {
      if (!exchange_.sources_[round]) missing.push_back(exchange_.source_of(round));
      if (!exchange_.targets_[round].socket) missing.push_back(exchange_.target_of(round));
    }
    std::sort(missing.begin(), missing.end());
    missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
    return missing;
  }

  CallExchange& exchange_;
  const std::string token_;
  const std::optional<core::Secret> secret_;
  std::vector<Line> calls_;
  std::vector<Line> guests_;  // oldest first
};

CallExchange::CallExchange(c10d::Store& store, int rank, int size, const std::string& address,
                           std::chrono::milliseconds limit,
                           const std::optional<core::Secret>& secret)
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
  Meeting meeting(*this, token, secret);
  meeting.call(store, deadline);
  meeting.finish(listener, deadline);
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
