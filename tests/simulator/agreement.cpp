// The ranks of a group agree, through the job's store and by letters, on why it ended, and on whom
// a wait is waiting for. The store is slow, and gone for some; letters are lost.

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/failure_agreement.h"
#include "comm/store/table.h"
#include "simulator/random.h"
#include "simulator/table_keys.h"
#include "simulator/world.h"

namespace tessera::simulator {
namespace {

using comm::Clock;
using comm::Failure;
using comm::FailureAgreement;
using comm::store::Operation;
using comm::store::Packet;
using std::chrono::milliseconds;

constexpr std::uint64_t kSequence = 7;
// What FailureChannel and GroupMonitor do, by the clock.
constexpr milliseconds kLookEvery{20};
constexpr milliseconds kPatience{1000};
constexpr milliseconds kHearingLimit{200};
constexpr milliseconds kRollCallAfter{1000};
// From an arrival until everybody who asks must have heard of it: a look, a poll, two slow errands.
constexpr milliseconds kNews{400};

class StoreGone : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Agreement {
 public:
  Agreement(std::uint64_t seed, bool tells) : random_(seed), tells_(tells) {}

  void run() {
    const auto size = static_cast<int>(random_.between(2, 5));
    for (int rank = 0; rank < size; ++rank)
      ranks_.push_back(std::make_unique<Rank>(*this, rank, size));
    const bool is_about_roll = random_.flip();
    for (const auto& rank : ranks_) {
      rank->arrives = begin_ + milliseconds(random_.between(0, 1500));
      // Somebody never comes, sometimes.
      if (is_about_roll && random_.one_in(4)) rank->arrives = Clock::time_point::max();
      if (!is_about_roll && random_.one_in(3)) {
        rank->sees_at = begin_ + milliseconds(random_.between(0, 1500));
      }
      if (!is_about_roll && random_.one_in(6)) {
        rank->store_ends = begin_ + milliseconds(random_.between(0, 2000));
      }
    }
    while (now_ < begin_ + milliseconds(3500)) {
      now_ += milliseconds(random_.between(1, 12));
      // In any order.
      for (std::size_t i = ranks_.size(); i > 0; --i) step(*ranks_[random_.below(ranks_.size())]);
    }
    check();
  }

 private:
  struct Rank;

  // The shipped table, with the calls of other ranks in between.
  class Keys final : public TableKeys {
   public:
    Keys(Agreement& world, Rank& rank) : world_(world), rank_(rank) {}

   private:
    Packet ask(Operation operation, std::vector<std::string> parts) override;
    Agreement& world_;
    Rank& rank_;
  };

  struct Rank {
    Rank(Agreement& world, int the_number, int size)
        : number(the_number), agreement(the_number, size), keys(world, *this) {}
    int number;
    FailureAgreement agreement;
    Keys keys;
    Clock::time_point arrives{};
    std::optional<Clock::time_point> sees_at;     // when it sees a failure by itself
    std::optional<Clock::time_point> store_ends;  // when it loses the store
    Clock::time_point next_look{};
    std::optional<Clock::time_point> errand_at;
    std::optional<Clock::time_point> published_at;
    std::optional<Clock::time_point> heard_at;
    bool is_running = false;  // in an errand; the others go on
    bool was_slow = false;
    bool has_written = false;
    std::optional<std::vector<int>> blamed;
    std::string own_text;
  };

  void step(Rank& rank) {
    if (rank.is_running) return;
    if (rank.errand_at && now_ >= *rank.errand_at) run_errand(rank);
    if (now_ < rank.next_look || now_ < rank.arrives) return;
    rank.next_look = now_ + kLookEvery;
    look(rank);
  }

  // What a rank that waits does every few milliseconds.
  void look(Rank& rank) {
    FailureAgreement& agreement = rank.agreement;
    take_letters(rank);
    agreement.poll(now_);
    const bool is_over = agreement.known().has_value();
    if (!is_over && rank.sees_at && now_ >= *rank.sees_at && !rank.published_at) {
      rank.own_text = "rank " + std::to_string(rank.number) + " saw it";
      agreement.publish(Failure(comm::FailureKind::kPeerLost, {rank.number}, rank.own_text));
      rank.published_at = now_;
      seen_.insert(rank.own_text);
    }
    if (rank.published_at && now_ > *rank.published_at + kPatience) agreement.give_up();
    if (rank.published_at && agreement.known() && !rank.has_written) write_letters(rank);
    if (!agreement.known()) {
      const bool asks = now_ > rank.arrives + kRollCallAfter;
      rank.blamed = agreement.call_roll(kSequence, asks);
      if (rank.blamed) check_blame(rank);
    }
    if (agreement.has_errand() && !rank.errand_at) {
      const bool is_slow = random_.one_in(300);
      rank.was_slow |= is_slow;
      rank.errand_at =
          now_ + milliseconds(is_slow ? random_.between(500, 1500) : random_.between(0, 30));
    }
  }

  void run_errand(Rank& rank) {
    rank.errand_at.reset();
    const auto errand = rank.agreement.take();
    std::optional<FailureAgreement::Tidings> tidings;
    rank.is_running = true;
    try {
      tidings = rank.agreement.run(errand, rank.keys, [this] { return now_; });
    } catch (const StoreGone&) {
    }
    rank.is_running = false;
    rank.agreement.settle(errand, std::move(tidings));
  }

  void write_letters(Rank& rank) {
    rank.has_written = true;
    for (const auto& other : ranks_) {
      if (other->number == rank.number || random_.one_in(4)) continue;
      letters_.push_back(
          {other->number, now_ + milliseconds(random_.between(0, 40)), rank.agreement.letter()});
    }
  }

  void take_letters(Rank& rank) {
    std::erase_if(letters_, [&](const Letter& letter) {
      if (letter.to != rank.number || letter.due > now_) return false;
      if (!rank.agreement.known() && rank.agreement.hear(letter.text)) rank.heard_at = now_;
      return true;
    });
    if (rank.heard_at && now_ > *rank.heard_at + kHearingLimit) {
      rank.was_slow |= !rank.agreement.known();
      rank.agreement.give_up();
    }
  }

  // Nobody is blamed who has been there for a while.
  void check_blame(const Rank& asker) const {
    for (const int late : *asker.blamed) {
      const Rank& rank = *ranks_[static_cast<std::size_t>(late)];
      require(late != asker.number, "no rank blames itself");
      // One that has lost the store cannot be heard.
      const bool is_deaf = rank.store_ends && now_ >= *rank.store_ends;
      require(now_ < rank.arrives || now_ - rank.arrives < kNews || is_deaf || has_slow(),
              "a rank that waits is not called late");
    }
  }
  bool has_slow() const {
    return std::any_of(ranks_.begin(), ranks_.end(),
                       [](const auto& rank) { return rank->was_slow; });
  }

  void check() {
    std::optional<std::string> settled;
    for (const auto& rank : ranks_) {
      const auto& known = rank->agreement.known();
      if (known) require(seen_.contains(known->what()), "the reason is one that a rank has seen");
      // Who lost the store, or was left waiting by it, may have to go by what it has seen.
      if (rank->store_ends || rank->was_slow) continue;
      if (!known) continue;
      require(!settled || *settled == known->what(), "all ranks with a store give one reason");
      settled = known->what();
    }
    for (const auto& rank : ranks_) {
      const bool is_waiting = rank->arrives < begin_ + milliseconds(2500);
      if (!settled || rank->store_ends || !is_waiting || has_slow()) continue;
      require(rank->agreement.known().has_value(), "who waits learns the reason");
    }
    for (const auto& asker : ranks_) {
      if (!asker->blamed || !seen_.empty() || has_slow()) continue;
      std::vector<int> absent;
      for (const auto& rank : ranks_) {
        if (rank->arrives == Clock::time_point::max()) absent.push_back(rank->number);
      }
      if (!absent.empty())
        require(*asker->blamed == absent, "who never came is named, and no other");
    }
    if (tells_)
      std::printf("  %zu ranks, %s\n", ranks_.size(), settled ? settled->c_str() : "no failure");
  }

  struct Letter {
    int to;
    Clock::time_point due;
    std::string text;
  };

  Random random_;
  bool tells_;
  std::optional<Packet> answer_;
  comm::store::Table table_{
      [this](comm::store::Client, const Packet& answer) { answer_ = answer; }};
  Clock::time_point now_{std::chrono::hours(1)};
  const Clock::time_point begin_ = now_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<Letter> letters_;
  std::set<std::string> seen_;
};

Packet Agreement::Keys::ask(Operation operation, std::vector<std::string> parts) {
  if (rank_.store_ends && world_.now_ >= *rank_.store_ends) throw StoreGone("gone");
  if (world_.random_.one_in(3)) {
    world_.now_ += milliseconds(1);
    world_.step(*world_.ranks_[world_.random_.below(world_.ranks_.size())]);
  }
  world_.table_.serve(static_cast<comm::store::Client>(rank_.number),
                      {static_cast<std::uint8_t>(operation), std::move(parts)});
  return *world_.answer_;
}

}  // namespace

void run_agreement(std::uint64_t seed, bool tells) { Agreement(seed, tells).run(); }

}  // namespace tessera::simulator
