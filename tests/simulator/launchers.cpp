// The launchers of several hosts on a network that delays, cuts and loses, with ranks that fail,
// hang and ignore signals, and hosts that die: what one attempt leaves never meets the next, the
// hosts end together and tell the same, a good end is one of all ranks, and every launcher ends.

#include <sys/socket.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launch/course.h"
#include "simulator/random.h"
#include "simulator/sim_network.h"
#include "simulator/world.h"
#include "tessera/launch/exit_code.h"

namespace tessera::simulator {
namespace {

using launch::Attempt;
using launch::RankFailure;
using launch::Ranks;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kRendezvousLimit{20};
constexpr seconds kShutdownLimit{3};
constexpr seconds kFarewell{2};
// By then whatever can happen has: meeting, attempts with their grace, and a host that says
// nothing.
constexpr seconds kLongest{600};

core::Secret secret_of(const char* text) { return core::Secret::from_text(text, "the simulator"); }

class Launchers;

// The ranks of one host in one attempt.
class SimRanks final : public Ranks {
 public:
  SimRanks(Launchers& world, int node, int attempt, Events events);
  ~SimRanks() override;

  void stop(milliseconds grace) override;
  void forward(int signal_number) override;
  void kill_all() override;
  bool is_gone() const noexcept override { return is_gone_; }
  std::vector<RankFailure> failures() const override;
  const std::vector<int>& killed_ranks() const noexcept override { return killed_; }

  int attempt() const { return attempt_; }
  bool has_living() const;
  /// A rank of the job has failed somewhere: those here may notice.
  void notice_failure();

 private:
  struct Rank {
    bool is_alive = true;
    bool was_stopped = false;
    int exit_code = 0;
    int signal_number = 0;
    int order = 0;
    std::int64_t ended_ns = 0;
  };
  void after(Duration delay, std::function<void()> then);
  void end(std::size_t rank, int exit_code, int signal_number);
  int number_of(std::size_t local) const;

  Launchers& world_;
  launch::EventLoop& loop_;
  int node_;
  int attempt_;
  Events events_;
  std::vector<Rank> ranks_;
  std::vector<launch::EventLoop::TimerId> timers_;
  bool has_failed_ = false;
  bool is_stopping_ = false;
  bool has_grace_ = false;
  bool is_gone_ = false;
  int num_ended_ = 0;
  std::vector<int> killed_;
};

// One host: its launcher, and what that launcher has done.
class Host final : public launch::CourseHost {
 public:
  Host(Launchers& world, int node, int num_nodes);

  void open_stores(Attempt& attempt, const launch::SocketAddress*) override {
    attempt.master_address = "10.0.0.1";
    attempt.master_port = 1;
    attempt.store = "tcp:10.0.0.1:2";
  }
  std::unique_ptr<Ranks> start_ranks(Attempt& attempt, Ranks::Events events) override;
  bool may_report() const override { return true; }
  void note(const std::string& line) override;
  void report(const std::vector<RankFailure>& failures, const Attempt&) override {
    told = failures;
  }

  Launchers& world;
  const int node;
  launch::RunOptions options;
  SimLoop loop;
  SimWire wire;
  std::unique_ptr<launch::Course> course;
  SimRanks* ranks = nullptr;  // the course's; null once it is gone
  bool has_died = false;
  std::optional<Clock::time_point> over_since;
  std::vector<int> attempts;
  std::vector<RankFailure> told;
};

class Launchers {
 public:
  Launchers(std::uint64_t seed, bool tells) : random(seed), network(random), tells_(tells) {}

  void run() {
    const int num_nodes = static_cast<int>(random.between(1, 4));
    num_local_ranks = static_cast<int>(random.between(1, 2));
    max_restarts = static_cast<int>(random.between(0, 2));
    one_rank_fails_in = random.flip() ? 0 : random.between(2, 8);
    is_long = random.one_in(3);
    for (int node = 0; node < num_nodes; ++node)
      hosts.push_back(std::make_unique<Host>(*this, node, num_nodes));
    plan();
    while (!all_over() && network.now() < begin_ + kLongest) step();
    require(all_over(), "every launcher ends");
    if (tells_) tell_end();
    check();
  }

  // What the hosts and their ranks tell the world.
  void check_start(int node, int attempt) {
    Host& host = *hosts[static_cast<std::size_t>(node)];
    require(host.attempts.empty() || host.attempts.back() < attempt,
            "attempts of a host go forward");
    require(attempt <= max_restarts, "there are no more attempts than were allowed");
    host.attempts.push_back(attempt);
    if (node == 0 && attempt == 0) check_addresses(*host.course);
    last_attempt_ = std::max(last_attempt_, attempt);
    for (const auto& other : hosts) {
      if (other->has_died || network.is_lost(other->node) || other->ranks == nullptr) continue;
      require(other->ranks->attempt() == attempt || !other->ranks->has_living(),
              "no rank of one attempt meets one of another");
    }
  }
  // By these node 0 knows who may ask for torch's store.
  void check_addresses(const launch::Course& leader) const {
    require(!leader.has_host("10.0.0.0"), "a stranger's address is not a host's");
    for (std::size_t node = 1; node < hosts.size(); ++node) {
      std::vector<std::string> addresses = SimNetwork::hosts_of(static_cast<int>(node));
      addresses.push_back("10.0.0." + std::to_string(node + 1));  // where it calls from
      for (const std::string& address : addresses) {
        require(leader.has_host(address), "node 0 knows all addresses of the hosts it starts with");
      }
    }
  }
  void on_rank_failed(int attempt, int rank, int exit_code, int signal_number) {
    ends_[{attempt, rank}] = {exit_code, signal_number};
    for (const auto& host : hosts) {
      if (host->ranks != nullptr && host->ranks->attempt() == attempt)
        host->ranks->notice_failure();
    }
  }
  void on_rank_ended_well(int attempt, int rank) { ends_[{attempt, rank}] = {0, 0}; }
  bool tells() const { return tells_; }

  Random random;
  SimNetwork network;
  std::vector<std::unique_ptr<Host>> hosts;
  int num_local_ranks = 1;
  int max_restarts = 0;
  std::int64_t one_rank_fails_in = 0;
  bool is_long = false;  // ranks work until they are told to end

 private:
  struct Deed {
    Clock::time_point when;
    std::string what;
    std::function<void()> act;
  };

  void add(Duration after, std::string what, std::function<void()> act) {
    deeds_.push_back({begin_ + after, std::move(what), std::move(act)});
  }

  void plan() {
    for (const auto& host : hosts) {
      if (hosts.size() > 1 && random.one_in(60)) {
        host->has_died = true;  // was never started
        is_disturbed_ = true;
        continue;
      }
      add(Duration(random.between(0, 2'000'000'000)), "start", [this, &host = *host] {
        if (!host.course) return;
        host.course->begin();
        host_started_.insert(host.node);
      });
    }
    for (std::int64_t i = random.between(0, 3); i > 0; --i) add_fault();
    if (is_long) add(seconds(100), "signal", [this] { send_signal(*hosts[0]); });
    std::sort(deeds_.begin(), deeds_.end(),
              [](const Deed& a, const Deed& b) { return a.when < b.when; });
  }

  void add_fault() {
    const Duration when(random.between(0, 12'000'000'000));
    Host& host = *hosts[random.below(hosts.size())];
    switch (random.below(6)) {
      case 0:
        return add(when, "crash", [this, &host] { crash(host); });
      case 1:
        return add(when, "lose", [this, &host] {
          network.lose(host.node);
          is_disturbed_ = true;
        });
      case 2:
        return add(when, "cut", [this, &host] {
          network.cut(host.node);
          is_disturbed_ = true;
        });
      case 3: {
        const Duration duration(random.between(10'000'000, 30'000'000'000));
        return add(when, "stall", [this, &host, duration] {
          network.stall(host.node, duration);
          is_disturbed_ |= duration > seconds(8);
        });
      }
      case 4:
        return add(when, "signal", [this, &host] { send_signal(host); });
      default:
        return add(when, "stranger", [this] { knock(); });
    }
  }

  void send_signal(Host& host) {
    if (!host.course || host.course->is_over() || !host_started_.contains(host.node)) return;
    ++num_signals_;
    host.course->on_signal(signal_number_);
  }

  void crash(Host& host) {
    is_disturbed_ = true;
    host.has_died = true;
    host.ranks = nullptr;
    if (host.node == 0) network.close_listener();
    host.course.reset();
  }

  // Somebody without the secret: noise, or the right words with another one.
  void knock() {
    auto socket = network.connect_stranger();
    if (!socket.is_open()) return;
    std::string noise = random.flip() ? std::string("tessera\x01", 8) : "";
    for (std::uint64_t i = random.below(200); i > 0; --i) noise += static_cast<char>(random.next());
    static_cast<void>(!::send(socket.get(), noise.data(), noise.size(), MSG_NOSIGNAL));
    strangers_.push_back({std::move(socket), 0});
  }

  void listen_to_strangers() {
    for (auto& [socket, num_told] : strangers_) {
      char buffer[4096];
      const ssize_t count = ::recv(socket.get(), buffer, sizeof(buffer), MSG_DONTWAIT);
      if (count > 0) num_told += count;
      require(num_told <= 8 + 32 + 32, "a stranger is told a number and no more");
    }
  }

  bool serve_hosts() {
    bool has_moved = false;
    for (const auto& host : hosts) {
      if (!host->course) continue;
      try {
        has_moved |= host->loop.serve();
      } catch (const launch::LaunchError&) {
        retire(*host);
        continue;
      }
      if (!host->course->is_over()) continue;
      if (!host->over_since) host->over_since = network.now();
      if (!host->course->has_unsent() || network.now() > *host->over_since + kFarewell)
        retire(*host);
    }
    return has_moved;
  }

  // The launcher's process ends, and with it what is left of its ranks.
  void retire(Host& host) {
    if (host.course->is_over()) {
      codes_[host.node] = host.course->exit_code();
      if (host.course->error()) errors_[host.node] = host.course->error()->what();
    }
    host.ranks = nullptr;
    if (host.node == 0) network.close_listener();
    host.course.reset();
  }

  void step() {
    // Everything that happens at this moment; then on to the next.
    for (int i = 0; i < 1000; ++i) {
      bool has_moved = serve_hosts();
      has_moved |= network.move();
      listen_to_strangers();
      if (!has_moved) break;
    }
    std::optional<Clock::time_point> next = network.next_moment();
    const auto take = [&](std::optional<Clock::time_point> moment) {
      if (moment) next = std::min(next.value_or(*moment), *moment);
    };
    for (const auto& host : hosts) {
      if (!host->course) continue;
      take(host->loop.next_moment());
      if (host->over_since) take(*host->over_since + kFarewell + milliseconds(1));
    }
    if (!deeds_.empty()) take(deeds_.front().when);
    if (!next) return network.jump_to(begin_ + kLongest);
    network.jump_to(*next);
    while (!deeds_.empty() && deeds_.front().when <= network.now()) {
      const Deed deed = deeds_.front();
      deeds_.erase(deeds_.begin());
      if (tells_) std::printf("  %8.3f s  %s\n", elapsed(), deed.what.c_str());
      deed.act();
    }
  }

  bool all_over() const {
    return std::all_of(hosts.begin(), hosts.end(),
                       [](const auto& host) { return host->has_died || !host->course; });
  }

  void check() const {
    // A good end is the end of all ranks of the last attempt.
    std::set<int> codes;
    for (const auto& [node, code] : codes_) {
      if (code) codes.insert(*code);
      if (code != 0) continue;
      for (int rank = 0; rank < static_cast<int>(hosts.size()) * num_local_ranks; ++rank) {
        const auto found = ends_.find({last_attempt_, rank});
        require(found != ends_.end() && found->second == std::pair(0, 0),
                "code 0 says that all ranks of the last attempt ended well");
      }
    }
    if (!is_disturbed_) {
      // Who is told to end before it has ranks, or is told twice, does not wait for the others.
      const bool may_leave = num_signals_ > 1 || (num_signals_ == 1 && one_rank_fails_in > 0);
      require(codes.size() <= 1 || may_leave, "the launchers of a job end with one code");
      if (num_signals_ == 0 && last_attempt_ >= 0) {
        for (const auto& [node, error] : errors_) {
          require(false, "nothing went wrong between the hosts: " + error);
        }
      }
    }
    for (const auto& host : hosts) {
      for (const RankFailure& failure : host->told) {
        if (failure.rank < 0) {
          require(is_disturbed_ || num_signals_ > 0, "no host is called lost that is there");
          continue;
        }
        const auto found = ends_.find({last_attempt_, failure.rank});
        require(found != ends_.end() &&
                    found->second == std::pair(failure.exit_code, failure.signal_number),
                "what is told of a rank is how it ended");
      }
      if (host->told.empty() || is_disturbed_ || hosts[0]->told.empty()) continue;
      require(launch::root_cause(host->told) < host->told.size() &&
                  host->told[launch::root_cause(host->told)].rank ==
                      hosts[0]->told[launch::root_cause(hosts[0]->told)].rank,
              "all hosts tell one root cause");
    }
  }

  double elapsed() const { return std::chrono::duration<double>(network.now() - begin_).count(); }

  void tell_end() const {
    std::printf("  %8.3f s  over; attempts: %d\n", elapsed(), last_attempt_ + 1);
    for (const auto& [node, code] : codes_) {
      const auto error = errors_.find(node);
      std::printf("  node %d: %s\n", node,
                  code ? ("code " + std::to_string(*code)).c_str()
                       : (error == errors_.end() ? "?" : error->second.c_str()));
    }
  }

  friend class Host;
  bool tells_;
  const Clock::time_point begin_ = network.now();
  std::vector<Deed> deeds_;  // by time
  std::set<int> host_started_;
  std::vector<std::pair<launch::FileDescriptor, ssize_t>> strangers_;
  bool is_disturbed_ = false;  // hosts may have lost each other
  const int signal_number_ = random.flip() ? SIGTERM : SIGINT;
  int num_signals_ = 0;
  int last_attempt_ = -1;
  std::map<std::pair<int, int>, std::pair<int, int>> ends_;  // of (attempt, rank)
  std::map<int, std::optional<int>> codes_;
  std::map<int, std::string> errors_;
};

Host::Host(Launchers& the_world, int the_node, int num_nodes)
    : world(the_world), node(the_node), loop(world.network), wire(world.network, the_node) {
  options.num_local_ranks = world.num_local_ranks;
  options.node_rank = node;
  options.endpoint = launch::Endpoint{"10.0.0.1", 7};
  options.rendezvous_id = "job";
  options.rendezvous_timeout = kRendezvousLimit;
  options.max_restarts = world.max_restarts;
  options.shutdown_timeout = kShutdownLimit;
  options.num_nodes = num_nodes;
  static const core::Secret secret = secret_of("the secret of this job, which is long enough");
  Attempt attempt;
  attempt.run_id = "run";
  attempt.job_name = attempt.folder = "job";
  course = std::make_unique<launch::Course>(*this, loop, wire, options, secret, attempt);
}

std::unique_ptr<Ranks> Host::start_ranks(Attempt& attempt, Ranks::Events events) {
  if (world.random.one_in(50)) {
    world.is_disturbed_ = true;  // to the others it looks like the loss of this host
    throw launch::LaunchError(launch::kExitNotFound, "run: no such program", "", "");
  }
  world.check_start(node, attempt.number);
  auto made = std::make_unique<SimRanks>(world, node, attempt.number, std::move(events));
  ranks = made.get();
  return made;
}

void Host::note(const std::string& line) {
  if (world.tells()) std::printf("      node %d: %s\n", node, line.c_str());
}

SimRanks::SimRanks(Launchers& world, int node, int attempt, Events events)
    : world_(world),
      loop_(world.hosts[static_cast<std::size_t>(node)]->loop),
      node_(node),
      attempt_(attempt),
      events_(std::move(events)),
      ranks_(static_cast<std::size_t>(world.num_local_ranks)) {
  Random& random = world_.random;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const Duration work(random.between(1'000'000, 6'000'000'000));
    const bool fails = world_.one_rank_fails_in > 0 &&
                       random.one_in(static_cast<std::uint64_t>(world_.one_rank_fails_in));
    const bool by_signal = random.flip();
    if (world_.is_long && !fails) continue;
    after(work, [this, i, fails, by_signal] {
      end(i, fails && !by_signal ? 3 : 0, fails && by_signal ? SIGSEGV : 0);
    });
  }
}

SimRanks::~SimRanks() {
  for (const auto timer : timers_) loop_.cancel(timer);
  Host& host = *world_.hosts[static_cast<std::size_t>(node_)];
  if (host.ranks == this) host.ranks = nullptr;
}

void SimRanks::after(Duration delay, std::function<void()> then) {
  timers_.push_back(loop_.after(delay, std::move(then)));
}

int SimRanks::number_of(std::size_t local) const {
  return node_ * static_cast<int>(ranks_.size()) + static_cast<int>(local);
}

bool SimRanks::has_living() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.is_alive; });
}

void SimRanks::end(std::size_t place, int exit_code, int signal_number) {
  Rank& rank = ranks_[place];
  if (!rank.is_alive) return;
  rank.is_alive = false;
  rank.exit_code = exit_code;
  rank.signal_number = signal_number;
  rank.order = num_ended_++;
  rank.ended_ns = loop_.wall_ns();
  const bool is_bad = exit_code != 0 || signal_number != 0;
  if (is_bad) {
    world_.on_rank_failed(attempt_, number_of(place), exit_code, signal_number);
  } else {
    world_.on_rank_ended_well(attempt_, number_of(place));
  }
  if (is_bad && !is_stopping_ && !has_failed_) {
    has_failed_ = true;
    events_.on_failure();
  }
  if (num_ended_ == static_cast<int>(ranks_.size()) && !is_gone_) {
    is_gone_ = true;
    events_.on_gone();
  }
}

void SimRanks::notice_failure() {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (!ranks_[i].is_alive || !world_.random.flip()) continue;
    after(Duration(world_.random.between(1'000'000, 2'000'000'000)),
          [this, i] { end(i, launch::kExitLostPeer, 0); });
  }
}

void SimRanks::stop(milliseconds grace) {
  if (is_gone_ || is_stopping_ || has_grace_) return;
  has_grace_ = true;
  after(grace, [this] { forward(SIGTERM); });
}

void SimRanks::forward(int signal_number) {
  if (is_gone_) return;
  is_stopping_ = true;
  Random& random = world_.random;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (!ranks_[i].is_alive) continue;
    ranks_[i].was_stopped = true;
    const std::uint64_t way = random.below(4);  // dies of it, ends well, with a code, or is deaf
    if (way == 3) continue;
    after(Duration(random.between(1'000'000, 4'000'000'000)), [this, i, way, signal_number] {
      end(i, way == 2 ? 4 : 0, way == 0 ? signal_number : 0);
    });
  }
  after(kShutdownLimit, [this] {
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (ranks_[i].is_alive) killed_.push_back(number_of(i));
    }
    kill_all();
  });
}

void SimRanks::kill_all() {
  if (is_gone_) return;
  is_stopping_ = true;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (!ranks_[i].is_alive) continue;
    ranks_[i].was_stopped = true;
    after(Duration(world_.random.between(10'000, 50'000'000)), [this, i] { end(i, 0, SIGKILL); });
  }
}

std::vector<RankFailure> SimRanks::failures() const {
  std::vector<RankFailure> found;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = ranks_[i];
    if (rank.is_alive || (rank.exit_code == 0 && rank.signal_number == 0)) continue;
    RankFailure failure;
    failure.rank = number_of(i);
    failure.node = node_;
    failure.exit_code = rank.exit_code;
    failure.signal_number = rank.signal_number;
    failure.order = rank.order;
    failure.ended_ns = rank.ended_ns;
    failure.was_stopped = rank.was_stopped;
    found.push_back(failure);
  }
  return found;
}

}  // namespace

void run_launchers(std::uint64_t seed, bool tells) { Launchers(seed, tells).run(); }

}  // namespace tessera::simulator
