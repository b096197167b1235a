#include "comm/store/auth_store.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>

#include "comm/network.h"
#include "core/handshake.h"
#include "tessera/core/check.h"

namespace tessera::comm::store {
namespace {

using Clock = std::chrono::steady_clock;
using Moment = Clock::time_point;

constexpr auto kRetryPause = std::chrono::milliseconds(50);
// How long an answer may take that needs no waiting, on top of what the caller gave.
constexpr auto kAnswerSlack = std::chrono::milliseconds(1000);

std::string as_text(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
std::vector<std::uint8_t> as_bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::int64_t as_number(const std::string& text) {
  std::int64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

// c10d means "no limit" by zero.
Moment deadline_after(std::chrono::milliseconds timeout) {
  if (timeout == c10d::Store::kNoTimeout) return Moment::max();
  return Clock::now() + timeout;
}

// Whether the socket got ready in time.
bool await(int socket, short events, Moment deadline) {
  while (true) {
    int limit = -1;
    if (deadline != Moment::max()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      if (left.count() < 0) return false;
      limit = static_cast<int>(std::min<std::int64_t>(left.count(), 3'600'000));
    }
    pollfd request{.fd = socket, .events = events, .revents = 0};
    const int ready = ::poll(&request, 1, limit);
    if (ready > 0) return true;
    if (ready == 0 && deadline != Moment::max() && Clock::now() >= deadline) return false;
    if (ready < 0 && errno != EINTR) return true;  // the next call says why
  }
}

Socket connect_to_path(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    throw Error(ErrorKind::kRendezvous, {}, "the path of its socket is too long: " + path);
  }
  path.copy(address.sun_path, path.size());
  Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) throw Error(ErrorKind::kRendezvous, {}, std::strerror(errno));
  // A local connection stands at once or not at all; it waits only while the queue is full.
  while (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno != EINTR) throw Error(ErrorKind::kRendezvous, {}, std::strerror(errno));
  }
  return socket;
}

}  // namespace

Place Place::parse(const std::string& text) {
  Place place;
  if (text.starts_with("unix:/")) {
    place.path = text.substr(5);
    return place;
  }
  const auto colon = text.rfind(':');
  int port = 0;
  if (text.starts_with("tcp:") && colon > 4) {
    place.host = text.substr(4, colon - 4);
    std::from_chars(text.data() + colon + 1, text.data() + text.size(), port);
  }
  TESSERA_CHECK_VALUE(port > 0 && port < 65536, "comm.init: TESSERA_STORE is '", text,
                      "', not unix:PATH or tcp:HOST:PORT.");
  place.port = static_cast<std::uint16_t>(port);
  return place;
}

std::string Place::text() const { return path.empty() ? host + ":" + std::to_string(port) : path; }

class AuthStore::Connection {
 public:
  // Throws Error(kRendezvous) with the bare reason.
  Connection(const Place& place, const core::Secret& secret, Moment deadline)
      : socket_(place.path.empty() ? connect_to(place.host, place.port, deadline)
                                   : connect_to_path(place.path)) {
    core::Handshake handshake(core::Handshake::Side::kConnects, secret, kPurpose);
    while (handshake.state() == core::Handshake::State::kOpen) {
      if (!read_some(deadline)) throw Error(ErrorKind::kRendezvous, {}, "it does not answer");
      std::string to_send;
      handshake.advance(received_, to_send);
      if (!write(to_send, deadline)) throw Error(ErrorKind::kRendezvous, {}, "it does not read");
    }
    if (handshake.state() == core::Handshake::State::kRefused) {
      throw SecretRefused(ErrorKind::kRendezvous, {}, "it does not accept this process's secret");
    }
    if (handshake.state() != core::Handshake::State::kProven) {
      throw Error(ErrorKind::kRendezvous, {}, "what answers there does not know the job's secret");
    }
    writer_ = handshake.writer();
    reader_ = handshake.reader();
  }

  // False if the deadline is over. Throws Error if the connection broke.
  bool send(const Packet& packet, Moment deadline) {
    return write(writer_->frame(encode(packet)), deadline);
  }
  std::optional<Packet> receive(Moment deadline) {
    while (true) {
      if (auto text = reader_->next(received_, kLongest)) return decode(*text);
      if (!read_some(deadline)) return std::nullopt;
    }
  }

 private:
  bool write(std::string_view text, Moment deadline) {
    while (!text.empty()) {
      const ssize_t sent =
          ::send(socket_.get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent >= 0) {
        text.remove_prefix(static_cast<std::size_t>(sent));
      } else if (errno == EAGAIN) {
        if (!await(socket_.get(), POLLOUT, deadline)) return false;
      } else if (errno != EINTR) {
        throw Error(ErrorKind::kRendezvous, {}, std::strerror(errno));
      }
    }
    return true;
  }
  bool read_some(Moment deadline) {
    char buffer[16 << 10];
    while (true) {
      const ssize_t size = ::recv(socket_.get(), buffer, sizeof(buffer), MSG_DONTWAIT);
      if (size > 0) {
        received_.append(buffer, static_cast<std::size_t>(size));
        return true;
      }
      if (size == 0) throw Error(ErrorKind::kRendezvous, {}, "it closed the connection");
      if (errno == EAGAIN) {
        if (!await(socket_.get(), POLLIN, deadline)) return false;
      } else if (errno != EINTR) {
        throw Error(ErrorKind::kRendezvous, {}, std::strerror(errno));
      }
    }
  }

  Socket socket_;
  std::optional<core::FrameWriter> writer_;
  std::optional<core::FrameReader> reader_;
  std::string received_;
};

AuthStore::AuthStore(Place place, core::Secret secret, std::chrono::milliseconds timeout,
                     std::shared_ptr<HostedServer> server)
    : Store(timeout),
      server_(std::move(server)),
      place_(std::move(place)),
      secret_(std::move(secret)) {
  const Moment deadline = deadline_after(timeout);
  while (true) {
    try {
      // A listener that accepts and says nothing gets as long as it gives to strangers itself.
      const Moment limit = Clock::now() + std::chrono::seconds(core::kHandshakeSeconds);
      connection_ = std::make_unique<Connection>(place_, secret_, std::min(deadline, limit));
      return;
    } catch (const SecretRefused&) {
      throw;
    } catch (const Error&) {
      if (Clock::now() + kRetryPause >= deadline) throw;
    }
    std::this_thread::sleep_for(kRetryPause);
  }
}

AuthStore::~AuthStore() = default;

c10::intrusive_ptr<c10d::Store> AuthStore::clone() {
  try {
    return c10::make_intrusive<AuthStore>(place_, secret_, timeout_, server_);
  } catch (const Error& error) {
    C10_THROW_ERROR(DistNetworkError,
                    "The store at " + place_.text() + " is not reached: " + error.what());
  }
}

Packet AuthStore::ask(Operation operation, std::vector<std::string> parts) {
  return ask(operation, std::move(parts), timeout_);
}

Packet AuthStore::ask(Operation operation, std::vector<std::string> parts,
                      std::chrono::milliseconds timeout) {
  // Before the lock, which another thread may have held at the fork.
  TESSERA_CHECK_VALUE(maker_ == own_pid(), "comm.store: the connection to the store at ",
                      place_.text(), " belongs to process ", maker_, "; this is process ",
                      own_pid(), ", forked from it. Use the store in process ", maker_,
                      ", or a clone() of it.");
  const std::lock_guard lock(mutex_);
  if (!connection_) {
    C10_THROW_ERROR(DistNetworkError,
                    "The connection to the store at " + place_.text() + " has broken before.");
  }
  const bool may_wait =
      operation == Operation::kGet || operation == Operation::kWait || operation == Operation::kPop;
  try {
    const std::string first_key = parts.empty() ? "" : parts[0];
    // Whoever waits may look with a limit of nothing; the answer itself takes a moment.
    const Moment deadline = deadline_after(timeout);
    const Moment limit = deadline == Moment::max() ? deadline : deadline + kAnswerSlack;
    std::optional<Packet> answer;
    if (connection_->send({static_cast<std::uint8_t>(operation), std::move(parts)}, limit)) {
      answer = connection_->receive(may_wait ? deadline : limit);
    }
    if (!answer && may_wait &&
        connection_->send({static_cast<std::uint8_t>(Operation::kStopWaiting), {}}, limit)) {
      // What was waited for may have come at the last moment.
      const auto last = connection_->receive(Clock::now() + kAnswerSlack);
      if (last && last->code != static_cast<std::uint8_t>(Status::kStopped)) {
        answer = last;
        if (!connection_->receive(Clock::now() + kAnswerSlack)) connection_.reset();
      } else if (last) {
        C10_THROW_ERROR(DistStoreError, "The store has no key '" + first_key + "' after " +
                                            std::to_string(timeout.count()) + " ms.");
      }
    }
    if (!answer) {
      connection_.reset();
      C10_THROW_ERROR(DistStoreError, "The store at " + place_.text() + " does not answer within " +
                                          std::to_string(timeout.count()) + " ms.");
    }
    if (answer->code == static_cast<std::uint8_t>(Status::kWrong)) {
      C10_THROW_ERROR(DistStoreError,
                      "The store refuses the request: " +
                          (answer->parts.empty() ? std::string() : answer->parts[0]) + ".");
    }
    return *answer;
  } catch (const Error& error) {
    connection_.reset();
    C10_THROW_ERROR(DistNetworkError,
                    "The store at " + place_.text() + " is lost: " + error.what());
  } catch (const core::FrameError& error) {
    connection_.reset();
    C10_THROW_ERROR(DistNetworkError,
                    "The store at " + place_.text() + " is lost: " + error.what());
  } catch (const WireError& error) {
    connection_.reset();
    C10_THROW_ERROR(DistNetworkError,
                    "The store at " + place_.text() + " answers with " + error.what());
  }
}

void AuthStore::set(const std::string& key, const std::vector<std::uint8_t>& value) {
  ask(Operation::kSet, {key, as_text(value)});
}

std::vector<std::uint8_t> AuthStore::compareSet(const std::string& key,
                                                const std::vector<std::uint8_t>& expected,
                                                const std::vector<std::uint8_t>& wanted) {
  return as_bytes(
      ask(Operation::kCompareSet, {key, as_text(expected), as_text(wanted)}).parts.at(0));
}

std::vector<std::uint8_t> AuthStore::get(const std::string& key) {
  return as_bytes(ask(Operation::kGet, {key}).parts.at(0));
}

std::int64_t AuthStore::add(const std::string& key, std::int64_t value) {
  return as_number(ask(Operation::kAdd, {key, std::to_string(value)}).parts.at(0));
}

bool AuthStore::deleteKey(const std::string& key) {
  return ask(Operation::kDelete, {key}).parts.at(0) == "1";
}

bool AuthStore::check(const std::vector<std::string>& keys) {
  return ask(Operation::kCheck, keys).parts.at(0) == "1";
}

std::int64_t AuthStore::getNumKeys() { return as_number(ask(Operation::kCount, {}).parts.at(0)); }

void AuthStore::wait(const std::vector<std::string>& keys) { ask(Operation::kWait, keys); }

void AuthStore::wait(const std::vector<std::string>& keys,
                     const std::chrono::milliseconds& timeout) {
  ask(Operation::kWait, keys, timeout);
}

void AuthStore::append(const std::string& key, const std::vector<std::uint8_t>& value) {
  ask(Operation::kAppend, {key, as_text(value)});
}

std::vector<std::vector<std::uint8_t>> AuthStore::multiGet(const std::vector<std::string>& keys) {
  std::vector<std::vector<std::uint8_t>> values;
  for (const std::string& value : ask(Operation::kGet, keys).parts) {
    values.push_back(as_bytes(value));
  }
  return values;
}

void AuthStore::multiSet(const std::vector<std::string>& keys,
                         const std::vector<std::vector<std::uint8_t>>& values) {
  TESSERA_CHECK_VALUE(keys.size() == values.size(), "store: ", keys.size(), " keys were given for ",
                      values.size(), " values.");
  if (keys.empty()) return;
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    parts.push_back(keys[i]);
    parts.push_back(as_text(values[i]));
  }
  ask(Operation::kSet, std::move(parts));
}

void AuthStore::queuePush(const std::string& key, const std::vector<std::uint8_t>& value) {
  ask(Operation::kPush, {key, as_text(value)});
}

std::vector<std::uint8_t> AuthStore::queuePop(const std::string& key, bool block) {
  const Packet answer = ask(Operation::kPop, {key, block ? "1" : "0"});
  if (answer.code == static_cast<std::uint8_t>(Status::kNothing)) {
    C10_THROW_ERROR(DistQueueEmptyError, "The queue '" + key + "' is empty.");
  }
  return as_bytes(answer.parts.at(0));
}

std::int64_t AuthStore::queueLen(const std::string& key) {
  return as_number(ask(Operation::kLength, {key}).parts.at(0));
}

}  // namespace tessera::comm::store
