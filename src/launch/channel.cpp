#include "channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include <nlohmann/json.hpp>

namespace tessera::launch {
namespace {

constexpr size_t kLongestGreeting = 4 << 10;  // from a peer that has not said who it is
constexpr size_t kLongestLine = 8 << 20;      // failure reports of many ranks
constexpr size_t kLongestUnsent = 64 << 20;
constexpr std::chrono::seconds kBeat{5};
constexpr std::chrono::seconds kSilenceLimit{20};

}  // namespace

const std::string& Message::text(const std::string& name) const {
  static const std::string kNone;
  const auto found = fields.find(name);
  return found == fields.end() ? kNone : found->second;
}

int Message::number(const std::string& name) const {
  const std::string& digits = text(name);
  if (digits.empty() || digits.size() > 9) return -1;
  if (digits.find_first_not_of("0123456789") != std::string::npos) return -1;
  return std::stoi(digits);
}

Channel::Channel(EventLoop& loop, FileDescriptor socket, Events events)
    : loop_(loop),
      socket_(std::move(socket)),
      events_(std::move(events)),
      longest_line_(kLongestGreeting),
      last_received_(Clock::now()) {
  update_watch();
}

Channel::~Channel() { close(); }

void Channel::close() {
  if (socket_.is_open()) loop_.unwatch(socket_.get());
  socket_.reset();
  loop_.cancel(beat_timer_);
}

void Channel::trust() {
  longest_line_ = kLongestLine;
  beat();
}

void Channel::beat() {
  if (Clock::now() - last_received_ > kSilenceLimit) {
    fail("no sign of life for " + std::to_string(kSilenceLimit.count()) + " s");
    return;
  }
  send({"alive", {}});
  beat_timer_ = loop_.after(kBeat, [this] { beat(); });
}

void Channel::update_watch() {
  const short events = static_cast<short>(unsent_.empty() ? POLLIN : POLLIN | POLLOUT);
  loop_.watch(socket_.get(), events, [this](short ready) { on_ready(ready); });
}

void Channel::send(const Message& message) {
  if (!socket_.is_open()) return;
  nlohmann::json line = message.fields;
  line["kind"] = message.kind;
  unsent_ += line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  if (unsent_.size() > kLongestUnsent) {
    fail("it does not read what is sent");
    return;
  }
  write_some();
}

void Channel::write_some() {
  while (!unsent_.empty()) {
    const ssize_t sent = ::send(socket_.get(), unsent_.data(), unsent_.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      unsent_.erase(0, static_cast<size_t>(sent));
    } else if (errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      // What the peer said before it left may still wait to be read; reading will find the end.
      unsent_.clear();
    }
  }
  update_watch();
}

void Channel::on_ready(short events) {
  if ((events & POLLOUT) != 0) write_some();
  if (socket_.is_open() && (events & (POLLIN | POLLHUP | POLLERR)) != 0) read_some();
}

void Channel::read_some() {
  char buffer[16 << 10];
  const ssize_t size = recv(socket_.get(), buffer, sizeof(buffer), 0);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (size <= 0) {
    fail(size == 0 ? "the connection was closed" : std::strerror(errno));
    return;
  }
  last_received_ = Clock::now();
  received_.append(buffer, static_cast<size_t>(size));
  serve_lines();
}

void Channel::serve_lines() {
  size_t end = 0;
  while (socket_.is_open() && (end = received_.find('\n')) != std::string::npos) {
    const std::string line = received_.substr(0, end);
    received_.erase(0, end + 1);
    if (line.size() > longest_line_) break;
    const nlohmann::json object = nlohmann::json::parse(line, nullptr, false);
    Message message;
    if (!object.is_object()) {
      fail("it does not speak the launcher's protocol");
      return;
    }
    for (const auto& [key, value] : object.items()) {
      if (!value.is_string()) {
        fail("it does not speak the launcher's protocol");
        return;
      }
      (key == "kind" ? message.kind : message.fields[key]) = value.get<std::string>();
    }
    if (message.kind != "alive") events_.on_message(message);
  }
  if (socket_.is_open() && received_.size() > longest_line_) fail("its message is too long");
}

void Channel::fail(const std::string& why) {
  if (!socket_.is_open()) return;
  close();
  events_.on_closed(why);
}

}  // namespace tessera::launch
