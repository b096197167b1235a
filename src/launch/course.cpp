#include "course.h"

#include <csignal>

#include "process.h"
#include "tessera/launch/exit_code.h"

namespace tessera::launch {
namespace {

// Time for ranks that use the store to notice a dead peer and to report what they were doing.
constexpr std::chrono::milliseconds kReportGrace{30};

}  // namespace

Course::Course(CourseHost& host, EventLoop& loop, Wire& wire, const RunOptions& options,
               const core::Secret& secret, Attempt attempt)
    : host_(host),
      loop_(loop),
      wire_(wire),
      options_(options),
      secret_(secret),
      attempt_(std::move(attempt)) {}

Course::~Course() { loop_.cancel(next_attempt_); }

void Course::begin() {
  if (options_.num_nodes > 1) {
    join_other_nodes();
  } else {
    start_attempt(0);
  }
}

bool Course::has_unsent() const {
  return (coordinator_ && coordinator_->has_unsent()) || (member_ && member_->has_unsent());
}

void Course::on_signal(int number) {
  if (is_over()) return;
  const bool is_second = stop_signal_ != 0;
  if (!is_second) stop_signal_ = number;
  const bool kills = is_second && number == SIGINT;
  if (!is_second || kills) {
    const Message message{kills ? "kill" : "signal", {{"number", std::to_string(number)}}};
    if (coordinator_) coordinator_->broadcast(message);
    if (member_) member_->send(message);
  }
  if (!ranks_ || ranks_->is_gone()) {
    // Nothing runs here. Other hosts that still work have been told, and their end is awaited once.
    const bool awaits_others = options_.num_nodes > 1 && ranks_ && !is_second;
    if (!awaits_others) finish(exit_code_of_signal(stop_signal_));
  } else if (kills) {
    host_.note("second SIGINT: killing the ranks");
    ranks_->kill_all();
  } else if (!is_second) {
    host_.note(signal_name(number) + " received; the ranks have " +
               std::to_string(options_.shutdown_timeout.count() / 1000) + " s to end" +
               (number == SIGINT ? " (Ctrl-C again kills them)" : ""));
    ranks_->forward(number == SIGINT ? SIGINT : SIGTERM);
  }
}

void Course::join_other_nodes() {
  if (leads()) {
    const Message identity{"welcome",
                           {{"run_id", attempt_.run_id},
                            {"job_name", attempt_.job_name},
                            {"folder", attempt_.folder}}};
    Coordinator::Events events;
    events.on_complete = [this] { start_attempt(0); };
    events.on_message = [this](int node, const Message& message) {
      on_member_message(node, message);
    };
    events.on_lost = [this](int node, const std::string& why) { on_member_lost(node, why); };
    events.on_timeout = [this](const LaunchError& error) { error_ = error; };
    events.note = [this](const std::string& line) { host_.note(line); };
    coordinator_ =
        std::make_unique<Coordinator>(loop_, wire_, options_, secret_, identity, std::move(events));
    return;
  }
  Member::Events events;
  events.on_welcome = [this](const Message& message) {
    attempt_.run_id = message.text("run_id");
    attempt_.job_name = message.text("job_name");
    attempt_.folder = message.text("folder");
  };
  events.on_message = [this](const Message& message) { on_leader_message(message); };
  events.on_lost = [this](const std::string& why) { on_leader_lost(why); };
  events.on_refused = [this](const LaunchError& error) { error_ = error; };
  events.note = [this](const std::string& line) { host_.note(line); };
  member_ = std::make_unique<Member>(loop_, wire_, options_, secret_, std::move(events));
}

void Course::on_member_message(int node, const Message& message) {
  if (message.kind == "failed") {
    stop_everywhere();
  } else if (message.kind == "gone") {
    std::vector<RankFailure> failures;
    try {
      failures = failures_from_json(message.text("failures"));
    } catch (const std::exception&) {
      on_member_lost(node, "it sent a report that cannot be read");
      return;
    }
    on_node_gone(node, std::move(failures));
  } else if (message.kind == "signal" || message.kind == "kill") {
    coordinator_->broadcast(message, node);
    obey(message);
  }
}

void Course::obey(const Message& message) {
  const int number = message.number("number");
  if (stop_signal_ == 0) stop_signal_ = number;
  if (!ranks_) return;
  if (message.kind == "kill") {
    ranks_->kill_all();
  } else {
    ranks_->forward(number == SIGINT ? SIGINT : SIGTERM);
  }
}

void Course::on_member_lost(int node, const std::string& why) {
  if (exit_code_ || error_ || !ranks_) return;
  host_.note("node " + std::to_string(node) + " is lost: " + why);
  lost_nodes_.insert(node);
  RankFailure failure;
  failure.node = node;
  failure.exit_code = kExitLostPeer;
  failure.ended_ns = loop_.wall_ns();
  failure.message = "its launcher is lost: " + why;
  if (gone_nodes_.count(node) == 0) {
    stop_everywhere();
    on_node_gone(node, {failure});
  } else {
    failures_.push_back(failure);
    stop_everywhere();
  }
}

void Course::on_leader_message(const Message& message) {
  if (message.kind == "start") {
    attempt_.number = message.number("attempt");
    attempt_.master_address = message.text("address");
    attempt_.master_port = static_cast<uint16_t>(message.number("port"));
    attempt_.store = message.text("store");
    start_ranks();
  } else if (message.kind == "stop") {
    if (ranks_) ranks_->stop(grace());
  } else if (message.kind == "signal" || message.kind == "kill") {
    obey(message);
  } else if (message.kind == "restart") {
    host_.note(message.text("line"));
  } else if (message.kind == "end") {
    try {
      failures_ = failures_from_json(message.text("failures"));
    } catch (const std::exception&) {
      failures_.clear();
    }
    finish(message.number("code"));
  }
}

void Course::on_leader_lost(const std::string& why) {
  if (exit_code_ || error_) return;
  error_.emplace(kExitLostPeer, "run: node 0 is lost", why,
                 "look at the output of tessera run on node 0");
  // Without node 0 nobody waits for an orderly end; the ranks are ended with the launcher.
  if (ranks_) ranks_->kill_all();
}

void Course::start_attempt(int number) {
  attempt_.number = number;
  host_.open_stores(attempt_, coordinator_ ? &coordinator_->address() : nullptr);
  is_stopping_ = false;
  gone_nodes_.clear();
  failures_.clear();
  if (coordinator_) {
    coordinator_->broadcast({"start",
                             {{"attempt", std::to_string(number)},
                              {"address", attempt_.master_address},
                              {"port", std::to_string(attempt_.master_port)},
                              {"store", attempt_.store}}});
  }
  start_ranks();
}

void Course::start_ranks() {
  try {
    ranks_ =
        host_.start_ranks(attempt_, {[this] { on_local_failure(); }, [this] { on_local_gone(); }});
  } catch (const LaunchError& error) {
    fail(error);
  }
}

void Course::fail(const LaunchError& error) {
  if (is_over()) return;
  if (coordinator_) {
    coordinator_->broadcast(
        {"end", {{"code", std::to_string(error.exit_code())}, {"failures", "[]"}}});
  }
  error_ = error;
  if (ranks_ && !ranks_->is_gone()) ranks_->kill_all();
}

std::chrono::milliseconds Course::grace() const {
  if (options_.failure_grace) return *options_.failure_grace;
  return options_.num_nodes > 1 || host_.may_report() ? kReportGrace : std::chrono::milliseconds(0);
}

void Course::on_local_failure() {
  if (leads()) {
    stop_everywhere();
  } else {
    member_->send({"failed", {}});
    ranks_->stop(grace());
  }
}

void Course::stop_everywhere() {
  if (is_stopping_) return;
  is_stopping_ = true;
  if (coordinator_) coordinator_->broadcast({"stop", {}});
  ranks_->stop(grace());
}

void Course::on_local_gone() {
  if (!ranks_->killed_ranks().empty()) {
    host_.note(std::to_string(ranks_->killed_ranks().size()) +
               " rank(s) did not end in time and were killed, first rank " +
               std::to_string(ranks_->killed_ranks().front()));
  }
  std::vector<RankFailure> failures = ranks_->failures();
  if (leads()) {
    on_node_gone(0, std::move(failures));
  } else if (!error_) {
    member_->send({"gone", {{"failures", failures_to_json(failures)}}});
  }
}

void Course::on_node_gone(int node, std::vector<RankFailure> failures) {
  gone_nodes_.insert(node);
  failures_.insert(failures_.end(), failures.begin(), failures.end());
  if (!failures.empty()) stop_everywhere();
  if (static_cast<int>(gone_nodes_.size()) == options_.num_nodes) decide();
}

int Course::code_after_signal() const {
  if (failures_.empty()) return kExitOk;
  const RankFailure& root = failures_[root_cause(failures_)];
  // A host that had nothing to stop leaves at once, and is then missed.
  const bool is_host = root.rank < 0;
  const bool is_ended_by_it = root.was_stopped && root.signal_number != 0;
  return is_host || is_ended_by_it ? exit_code_of_signal(stop_signal_) : exit_code_of(root);
}

void Course::decide() {
  const bool may_restart = !failures_.empty() && stop_signal_ == 0 && lost_nodes_.empty() &&
                           attempt_.number < options_.max_restarts;
  if (may_restart) {
    const RankFailure& root = failures_[root_cause(failures_)];
    const std::string message = root.message.substr(0, root.message.find('\n')).substr(0, 200);
    const std::string line = "rank " + std::to_string(root.rank) + " failed (" + how_ended(root) +
                             ")" + (message.empty() ? "" : ": " + message) + "; restart " +
                             std::to_string(attempt_.number + 1) + " of " +
                             std::to_string(options_.max_restarts);
    host_.note(line);
    if (coordinator_) coordinator_->broadcast({"restart", {{"line", line}}});
    // Not from inside the group's own callback, which would destroy it.
    next_attempt_ = loop_.after(std::chrono::nanoseconds(0), [this] {
      // A signal, or the loss of a node, may have come in between.
      if (is_over()) return;
      if (stop_signal_ != 0 || !lost_nodes_.empty()) return decide();
      try {
        start_attempt(attempt_.number + 1);
      } catch (const LaunchError& error) {
        error_ = error;
      }
    });
    return;
  }
  int code = kExitOk;
  if (stop_signal_ != 0) {
    code = code_after_signal();
  } else if (!failures_.empty()) {
    code = exit_code_of(failures_[root_cause(failures_)]);
  }
  if (coordinator_) {
    coordinator_->broadcast(
        {"end", {{"code", std::to_string(code)}, {"failures", failures_to_json(failures_)}}});
  }
  finish(code);
}

void Course::finish(int code) {
  if (ranks_ && !ranks_->is_gone()) {
    // The end came from node 0 while ranks still run here, or from a signal: no more waiting.
    error_.emplace(code, "run: node 0 ended the job", "it could not start its ranks",
                   "look at the output of tessera run on node 0");
    ranks_->kill_all();
    return;
  }
  exit_code_ = code;
  if (failures_.empty()) return;
  const RankFailure& root = failures_[root_cause(failures_)];
  // What ended because somebody pressed Ctrl-C has not failed.
  const bool is_ended_by_it = root.was_stopped || root.rank < 0;
  if (stop_signal_ != 0 && is_ended_by_it && !root.has_error_file) return;
  host_.report(failures_, attempt_);
}

}  // namespace tessera::launch
