#include "channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include <nlohmann/json.hpp>

namespace tessera::launch {
namespace {

constexpr size_t kLongestGreeting = 4 << 10;  // from a peer that has not said which node it is
constexpr size_t kLongest = 8 << 20;          // failure reports of many ranks
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

Channel::Channel(EventLoop& loop, FileDescriptor socket, core::Handshake handshake, Events events)
    : loop_(loop),
      socket_(std::move(socket)),
      handshake_(std::move(handshake)),
      events_(std::move(events)),
      longest_(kLongestGreeting),
      unsent_(handshake_.opening()),
      last_received_(loop.now()) {
  write_some();
}

Channel::~Channel() { close(); }

void Channel::close() {
  if (socket_.is_open()) loop_.unwatch(socket_.get());
  socket_.reset();
  loop_.cancel(beat_timer_);
}

void Channel::trust() {
  longest_ = kLongest;
  beat();
}

void Channel::beat() {
  if (loop_.now() - last_received_ > kSilenceLimit) {
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
  if (!socket_.is_open() || !writer_) return;
  nlohmann::json object = message.fields;
  object["kind"] = message.kind;
  unsent_ += writer_->frame(object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
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
  last_received_ = loop_.now();
  received_.append(buffer, static_cast<size_t>(size));
  if (!reader_) shake_hands();
  if (reader_) serve_frames();
}

void Channel::shake_hands() {
  const core::Handshake::State state = handshake_.advance(received_, unsent_);
  write_some();
  if (state == core::Handshake::State::kOpen) return;
  if (state != core::Handshake::State::kProven) {
    fail(state == core::Handshake::State::kRefused ? "it does not accept this host's secret"
                                                   : "it does not know the job's secret");
    return;
  }
  writer_ = handshake_.writer();
  reader_ = handshake_.reader();
  events_.on_proven();
}

void Channel::serve_frames() {
  try {
    while (socket_.is_open()) {
      const std::optional<std::string> text = reader_->next(received_, longest_);
      if (!text) return;
      serve(*text);
    }
  } catch (const core::FrameError& error) {
    fail(error.what());
  }
}

void Channel::serve(const std::string& text) {
  const nlohmann::json object = nlohmann::json::parse(text, nullptr, false);
  Message message;
  bool is_message = object.is_object();
  for (auto entry = object.begin(); is_message && entry != object.end(); ++entry) {
    is_message = entry.value().is_string();
    if (!is_message) break;
    auto value = entry.value().get<std::string>();
    (entry.key() == "kind" ? message.kind : message.fields[entry.key()]) = std::move(value);
  }
  if (!is_message) {
    fail("it does not speak the launcher's protocol");
  } else if (message.kind != "alive") {
    events_.on_message(message);
  }
}

void Channel::fail(const std::string& why) {
  if (!socket_.is_open()) return;
  close();
  events_.on_closed(why);
}

}  // namespace tessera::launch
