#include "rendezvous.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <sstream>

#include "core/host_name.h"
#include "core/listening.h"
#include "tessera/launch/exit_code.h"

namespace tessera::launch {
namespace {

constexpr char kProtocol[] = "tessera-launch-2";
constexpr char kPurpose[] = "launchers";
constexpr size_t kLongestRefusals = 2000;
constexpr std::chrono::seconds kGreetingLimit{core::kHandshakeSeconds};
constexpr std::chrono::milliseconds kRetryDelay{100};
constexpr std::chrono::seconds kFirstReminder{5};
constexpr std::chrono::seconds kReminder{30};

std::string seconds_text(std::chrono::nanoseconds duration) {
  const auto tenths = std::chrono::duration_cast<std::chrono::milliseconds>(duration).count() / 100;
  const std::string text = std::to_string(tenths / 10);
  return (tenths % 10 == 0 ? text : text + "." + std::to_string(tenths % 10)) + " s";
}

std::set<std::string> words_of(const std::string& text) {
  std::istringstream words(text);
  return {std::istream_iterator<std::string>(words), {}};
}

}  // namespace

Coordinator::Coordinator(EventLoop& loop, Wire& wire, const RunOptions& options,
                         const core::Secret& secret, Message identity, Events events)
    : loop_(loop),
      wire_(wire),
      options_(options),
      endpoint_(options.endpoint.value()),
      secret_(secret),
      identity_(std::move(identity)),
      events_(std::move(events)),
      listener_(wire.listen(resolve(endpoint_))),
      stranger_log_(loop, [this](const std::string& line) { events_.note(line); }),
      begin_(loop.now()) {
  listen();
  reminder_ = loop_.after(kFirstReminder, [this] { remind(); });
  deadline_ = loop_.after(options_.rendezvous_timeout, [this] { time_out(); });
  if (listener_.address.is_loopback() && endpoint_.host != listener_.address.host() &&
      endpoint_.host != "localhost") {
    events_.note("warning: '" + endpoint_.host + "' is " + listener_.address.host() +
                 " on this host, which other hosts cannot reach; write its address instead");
  }
}

Coordinator::~Coordinator() {
  loop_.unwatch(listener_.fd.get());
  loop_.cancel(pause_);
  loop_.cancel(reminder_);
  loop_.cancel(deadline_);
  for (auto& [id, guest] : guests_) loop_.cancel(guest.deadline);
}

void Coordinator::listen() {
  loop_.watch(listener_.fd.get(), POLLIN, [this](short) { accept_guests(); });
}

// Whoever waits longest without a proof has had its chance. If there is nobody of the kind, those
// in line wait for a file to be closed, and the loop is not told of them without a pause.
void Coordinator::make_room() {
  if (!strangers_.empty()) return evict_stranger();
  loop_.unwatch(listener_.fd.get());
  loop_.cancel(pause_);
  pause_ = loop_.after(core::kPauseOfAccepting, [this] { listen(); });
}

void Coordinator::accept_guests() {
  for (int i = 0; i < core::kMostAccepted; ++i) {
    if (!accept_guest()) return;
  }
}

// Returns whether there may be more.
bool Coordinator::accept_guest() {
  std::string address;
  FileDescriptor socket = wire_.accept(listener_.fd.get(), address);
  if (!socket.is_open()) {
    if (core::is_scarcity(errno)) make_room();
    return false;
  }
  if (strangers_.size() >= core::kMostStrangers) evict_stranger();
  const int id = next_guest_++;
  Guest& guest = guests_[id];
  guest.address = address;
  guest.deadline = loop_.after(kGreetingLimit, [this, id] { drop(id); });
  strangers_.insert(id);
  Channel::Events events;
  events.on_proven = [this, id] { on_proven(id); };
  events.on_message = [this, id](const Message& message) {
    Guest& sender = guests_.at(id);
    if (sender.is_leaving) return;
    if (sender.node >= 0) {
      events_.on_message(sender.node, message);
    } else if (message.kind == "hello") {
      on_hello(sender, message);
    }
  };
  events.on_closed = [this, id](const std::string& why) {
    const int node = guests_.at(id).node;
    drop(id);
    if (node >= 0) events_.on_lost(node, why);
  };
  guest.channel = std::make_unique<Channel>(
      loop_, std::move(socket), core::Handshake(core::Handshake::Side::kListens, secret_, kPurpose),
      std::move(events));
  return true;
}

// It has a few seconds more to say which node it is.
void Coordinator::on_proven(int id) {
  strangers_.erase(id);
  Guest& guest = guests_.at(id);
  loop_.cancel(guest.deadline);
  guest.deadline = loop_.after(kGreetingLimit, [this, id] { drop(id); });
}

void Coordinator::evict_stranger() {
  if (!strangers_.empty()) drop(*strangers_.begin());
}

void Coordinator::on_hello(Guest& guest, const Message& hello) {
  const int node = hello.number("node");
  const std::string who = "node " + std::to_string(node) + " (" + printable(hello.text("host")) +
                          ", " + guest.address + ")";
  if (hello.text("protocol") != kProtocol) {
    return refuse(guest, who + " runs another version of tessera");
  }
  if (hello.text("rdzv_id") != options_.rendezvous_id) {
    return refuse(guest, who + " belongs to the job '" + printable(hello.text("rdzv_id")) +
                             "', this is '" + options_.rendezvous_id + "'");
  }
  if (hello.number("nnodes") != options_.num_nodes) {
    return refuse(guest, who + " was started with --nnodes " + printable(hello.text("nnodes")) +
                             ", node 0 with " + std::to_string(options_.num_nodes));
  }
  if (hello.number("nproc") != options_.num_local_ranks) {
    return refuse(guest, who + " was started with --nproc-per-node " +
                             printable(hello.text("nproc")) + ", node 0 with " +
                             std::to_string(options_.num_local_ranks));
  }
  if (node < 1 || node >= options_.num_nodes) {
    return refuse(
        guest, who + " does not exist: nodes are 1 to " + std::to_string(options_.num_nodes - 1));
  }
  if (const auto place = guest_of_node_.find(node); place != guest_of_node_.end()) {
    const auto other = guests_.find(place->second);
    return refuse(guest, who + (other != guests_.end()
                                    ? " is here already, from " + other->second.address
                                    : " was here and is lost to this job; start the job again"));
  }
  loop_.cancel(guest.deadline);
  guest.node = node;
  guest.hosts = words_of(hello.text("addresses"));
  guest.hosts.insert(plain_host(guest.address));
  for (const auto& [id, entry] : guests_) {
    if (&entry == &guest) guest_of_node_[node] = id;
  }
  guest.channel->send(identity_);
  guest.channel->trust();
  if (static_cast<int>(guest_of_node_.size()) == options_.num_nodes - 1) {
    is_complete_ = true;
    loop_.cancel(reminder_);
    loop_.cancel(deadline_);
    events_.on_complete();
  }
}

void Coordinator::refuse(Guest& guest, const std::string& why) {
  // A host that is started again and again says the same.
  if (refusals_.find(why) == std::string::npos && refusals_.size() < kLongestRefusals) {
    events_.note("refused: " + why);
    refusals_ += "; " + why;
  }
  guest.is_leaving = true;
  guest.channel->send({"refused", {{"why", why.substr(0, 2000)}}});
}

void Coordinator::drop(int id) {
  const auto found = guests_.find(id);
  if (found == guests_.end()) return;
  loop_.cancel(found->second.deadline);
  if (found->second.node >= 0 && !is_complete_) {
    // Gone before the job began: its place is free again.
    guest_of_node_.erase(found->second.node);
  }
  if (strangers_.erase(id) != 0) stranger_log_.add(found->second.address);
  found->second.channel->close();
  found->second.is_leaving = true;
  // The channel may be the caller, so it is destroyed once the stack is clear.
  found->second.deadline =
      loop_.after(std::chrono::nanoseconds(0), [this, id] { guests_.erase(id); });
}

std::string Coordinator::missing_nodes() const {
  std::string names;
  int count = 0;
  for (int node = 1; node < options_.num_nodes; ++node) {
    if (guest_of_node_.count(node) != 0) continue;
    names += (names.empty() ? "" : ", ") + std::to_string(node);
    ++count;
  }
  return (count == 1 ? "node " : "nodes ") + names;
}

void Coordinator::remind() {
  events_.note("waiting for " + missing_nodes() + " at " + address().text() + " (" +
               seconds_text(loop_.now() - begin_) + " of " +
               seconds_text(options_.rendezvous_timeout) + ")");
  reminder_ = loop_.after(kReminder, [this] { remind(); });
}

void Coordinator::time_out() {
  const std::string strangers = stranger_log_.summary();
  const LaunchError error(
      kExitRendezvous,
      "rendezvous: " + missing_nodes() + " of " + std::to_string(options_.num_nodes) +
          " did not join within " + seconds_text(options_.rendezvous_timeout),
      "node 0 waits at " + address().text() + refusals_ + (strangers.empty() ? "" : "; ") +
          strangers,
      "start tessera run with the same --nnodes and --nproc-per-node on every host, or raise "
      "--rdzv-timeout");
  broadcast({"refused", {{"why", std::string(error.what()).substr(std::strlen("rendezvous: "))}}});
  events_.on_timeout(error);
}

void Coordinator::broadcast(const Message& message, int except_node) {
  for (auto& [id, guest] : guests_) {
    if (guest.node >= 0 && guest.node != except_node) guest.channel->send(message);
  }
}

bool Coordinator::has_unsent() const {
  for (const auto& [id, guest] : guests_) {
    if (guest.channel->is_open() && guest.channel->has_unsent()) return true;
  }
  return false;
}

bool Coordinator::has_host(const std::string& host) const {
  return std::any_of(guests_.begin(), guests_.end(), [&](const auto& entry) {
    return entry.second.node >= 0 && entry.second.hosts.contains(host);
  });
}

Member::Member(EventLoop& loop, Wire& wire, const RunOptions& options, const core::Secret& secret,
               Events events)
    : loop_(loop),
      wire_(wire),
      options_(options),
      secret_(secret),
      events_(std::move(events)),
      address_(resolve(options.endpoint.value())),
      begin_(loop.now()) {
  deadline_ = loop_.after(options_.rendezvous_timeout, [this] {
    give_up(LaunchError(
        kExitRendezvous,
        "rendezvous: node 0 at " + address_.text() + " was not reached within " +
            seconds_text(options_.rendezvous_timeout),
        last_reason_.empty() ? "no answer" : last_reason_,
        "check that node 0 runs with the same --rdzv-endpoint, or raise --rdzv-timeout"));
  });
  reminder_ = loop_.after(kFirstReminder, [this] {
    events_.note("waiting for node 0 at " + address_.text() + " (" + last_reason_ + ")");
  });
  knock();
}

Member::~Member() {
  if (connecting_.is_open()) loop_.unwatch(connecting_.get());
  for (const EventLoop::TimerId timer : {retry_, reminder_, deadline_}) loop_.cancel(timer);
}

void Member::knock() {
  finished_.reset();
  connecting_ = wire_.connect(address_);
  if (!connecting_.is_open()) return try_again(std::strerror(errno));
  loop_.watch(connecting_.get(), POLLOUT, [this](short) { on_connected(); });
}

void Member::try_again(const std::string& why) {
  last_reason_ = why;
  if (connecting_.is_open()) loop_.unwatch(connecting_.get());
  connecting_.reset();
  if (!is_over_) retry_ = loop_.after(kRetryDelay, [this] { knock(); });
}

void Member::on_connected() {
  const int error = wire_.outcome(connecting_.get());
  if (error != 0) return try_again(std::strerror(error));
  loop_.unwatch(connecting_.get());
  last_reason_ = "connected, but it has not answered";
  Channel::Events events;
  events.on_proven = [this] { say_hello(); };
  events.on_message = [this](const Message& message) { on_message(message); };
  events.on_closed = [this](const std::string& why) { on_closed(why); };
  channel_ = std::make_unique<Channel>(
      loop_, std::move(connecting_),
      core::Handshake(core::Handshake::Side::kConnects, secret_, kPurpose), std::move(events));
}

void Member::say_hello() {
  // The ranks here may reach node 0 from another address than this launcher does.
  std::string addresses;
  for (const std::string& host : wire_.hosts()) addresses += host + " ";
  channel_->send({"hello",
                  {{"protocol", kProtocol},
                   {"rdzv_id", options_.rendezvous_id},
                   {"node", std::to_string(options_.node_rank)},
                   {"nnodes", std::to_string(options_.num_nodes)},
                   {"nproc", std::to_string(options_.num_local_ranks)},
                   {"host", core::host_name()},
                   {"addresses", addresses}}});
}

void Member::on_closed(const std::string& why) {
  if (is_over_) return;
  if (is_welcome_) return events_.on_lost(why);
  if (channel_->state() == core::Handshake::State::kRefused) {
    return give_up(LaunchError(
        kExitRendezvous,
        "rendezvous: node 0 at " + address_.text() + " does not accept this host's secret",
        "it was started with another one, or with --insecure-no-auth",
        "give every host the same secret file by --secret-file or "
        "TESSERA_JOB_SECRET_FILE"));
  }
  finished_ = std::move(channel_);
  try_again(why);
}

void Member::give_up(const LaunchError& error) {
  is_over_ = true;
  events_.on_refused(error);
}

void Member::on_message(const Message& message) {
  if (message.kind == "refused") {
    give_up(LaunchError(kExitRendezvous, "rendezvous: " + message.text("why"),
                        "node 0 at " + address_.text() + " says so",
                        "give every host the same --nnodes, --nproc-per-node and --rdzv-id, and "
                        "each its own --node-rank"));
  } else if (message.kind == "welcome" && !is_welcome_) {
    is_welcome_ = true;
    // From here on node 0 bounds the wait for the others.
    loop_.cancel(deadline_);
    loop_.cancel(reminder_);
    channel_->trust();
    events_.on_welcome(message);
  } else if (is_welcome_) {
    events_.on_message(message);
  }
}

void Member::send(const Message& message) {
  if (channel_) channel_->send(message);
}

bool Member::has_unsent() const {
  return channel_ && channel_->is_open() && channel_->has_unsent();
}

}  // namespace tessera::launch
