// The ranks of a group find each other on the job's store, or learn why they cannot: some come
// late, twice, never, with another size, or die on the way. The store is slow, and gone for some.

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/meeting.h"
#include "comm/store/table.h"
#include "simulator/random.h"
#include "simulator/table_keys.h"
#include "simulator/world.h"

namespace tessera::simulator {
namespace {

using comm::Clock;
using comm::Failure;
using comm::FailureKind;
using comm::Meeting;
using comm::Member;
using comm::store::Operation;
using comm::store::Packet;
using std::chrono::milliseconds;

// What make_engine and init do, by the clock.
constexpr milliseconds kDeathInterval{50};
constexpr milliseconds kMakerFirst{100};
constexpr milliseconds kFarewellLimit{2000};
constexpr milliseconds kFarewellLook{5};
// From an arrival until it must be in the store, and from an outcome until all have read it.
constexpr milliseconds kNews{200};

class StoreGone : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
class Killed {};

class Meetings {
 public:
  Meetings(std::uint64_t seed, bool tells) : random_(seed), tells_(tells) {}

  void run() {
    make_processes();
    const auto end = begin_ + limit_ + milliseconds(9000);
    while (now_ < end) {
      now_ += milliseconds(random_.between(1, 12));
      // In any order.
      for (std::size_t i = all_.size(); i > 0; --i) step(*all_[random_.below(all_.size())]);
    }
    if (tells_) tell();
    check();
  }

 private:
  struct Process;

  // The shipped table, with the calls of other processes in between.
  class Keys final : public TableKeys {
   public:
    Keys(Meetings& world, Process& process) : world_(world), process_(process) {}

   private:
    Packet ask(Operation operation, std::vector<std::string> parts) override;
    Meetings& world_;
    Process& process_;
  };

  // How one meeting ended for a process.
  struct End {
    std::int64_t generation = 0;
    std::map<int, Member> met;
    std::optional<Failure> failure;
    bool lost_store = false;
  };

  struct Process {
    Process(Meetings& world, std::uint64_t the_number, int the_rank, int the_size)
        : number(the_number), rank(the_rank), size(the_size), keys(world, *this) {}
    std::uint64_t number;
    int rank;
    int size;
    Keys keys;
    Member self;
    Clock::time_point arrives{};
    Clock::time_point arrives_first{};
    std::optional<Clock::time_point> dies;
    std::optional<Clock::time_point> store_ends;
    int rounds = 1;  // meetings it comes to, as long as they come to be
    std::optional<Meeting> meeting;
    Clock::time_point next_look{};
    Clock::time_point next_death_look{};
    std::optional<Clock::time_point> saw_death;
    std::optional<Clock::time_point> making_until;  // all have met, the transport is being made
    std::optional<Clock::time_point> farewells_until;
    bool is_in_call = false;
    bool is_dead = false;
    bool is_over = false;
    bool was_slow = false;
    bool has_arrived = false;
    std::vector<End> ends;
  };

  void make_processes() {
    const auto size = static_cast<int>(random_.between(1, 5));
    limit_ = milliseconds(random_.between(1, 4) * 500);
    const bool is_strange = random_.flip();  // or nothing is wrong but the hour
    const auto num_hosts = random_.between(1, 2);
    const int rounds = random_.one_in(3) ? 2 : 1;
    hosts_store_ = random_.flip();
    const auto chance = [&](std::uint64_t one_in) { return is_strange && random_.one_in(one_in); };
    for (int rank = 0; rank < size; ++rank) {
      for (int copy = chance(8) ? 2 : 1; copy > 0; --copy) {
        int told = size;
        if (chance(10)) told = std::max(rank + 1, size + (random_.flip() ? 1 : -1));
        all_.push_back(std::make_unique<Process>(*this, all_.size(), rank, told));
        Process& process = *all_.back();
        process.rounds = rounds;
        process.self = {.world_rank = rank,
                        .pid = static_cast<pid_t>(1000 + process.number),
                        .start_time = 7,
                        .host = "host" + std::to_string(random_.between(1, num_hosts)),
                        .host_name = "h"};
        process.arrives = begin_ + milliseconds(random_.between(0, random_.flip() ? 100 : 2500));
        if (chance(10)) process.arrives = Clock::time_point::max();
        process.arrives_first = process.arrives;
        if (chance(8)) process.dies = begin_ + milliseconds(random_.between(0, 3500));
        if (chance(12)) process.store_ends = begin_ + milliseconds(random_.between(0, 3500));
      }
    }
  }

  void step(Process& process) {
    if (process.is_in_call || process.is_dead) return;
    process.is_in_call = true;
    try {
      if (process.dies && now_ >= *process.dies) throw Killed();
      act(process);
    } catch (const Killed&) {
      process.is_dead = true;
      if (process.number == 0 && hosts_store_) store_ended_ = true;
    } catch (const StoreGone&) {
      End end{.lost_store = true};
      if (process.meeting) end.generation = process.meeting->generation().value_or(-1);
      finish(process, std::move(end));
    }
    process.is_in_call = false;
  }

  void act(Process& process) {
    if (process.farewells_until) return await_farewells(process);
    if (process.is_over || now_ < process.arrives) return;
    if (!process.meeting) {
      process.meeting.emplace(
          Meeting::Terms{
              .rank = process.rank, .size = process.size, .group_name = "world", .limit = limit_},
          process.self, now_);
      process.meeting->arrive(process.keys);
      process.has_arrived = true;
    }
    try {
      if (look_for_deaths(process)) return;
      if (process.making_until) {
        if (now_ >= *process.making_until) leave(process);
        return;
      }
      if (now_ < process.next_look) return;
      process.next_look = now_ + std::chrono::duration_cast<milliseconds>(process.meeting->pause());
      if (!process.meeting->look(process.keys, now_)) return;
      process.ends.push_back(
          {*process.meeting->generation(), process.meeting->known(), std::nullopt});
      process.making_until = now_ + milliseconds(random_.between(0, 300));
    } catch (const Failure& failure) {
      fail(process, failure);
    }
  }

  // What the thread that waits for a group does beside the one that makes it.
  bool look_for_deaths(Process& process) {
    if (now_ < process.next_death_look) return false;
    process.next_death_look = now_ + kDeathInterval;
    for (const auto& [rank, member] : process.meeting->known()) {
      const Process& other = *all_[static_cast<std::size_t>(member.pid - 1000)];
      if (member.host != process.self.host || !other.is_dead) continue;
      // The one that makes it may know more.
      if (!process.saw_death) process.saw_death = now_;
      if (now_ - *process.saw_death < kMakerFirst) return false;
      fail(process, Failure(FailureKind::kPeerLost, {rank}, member.describe() + " died"));
      return true;
    }
    return false;
  }

  void fail(Process& process, const Failure& failure) {
    End end{.generation = *process.meeting->generation()};
    end.failure = failure;
    if (failure.kind() == FailureKind::kPeerLost) {
      end.failure = comm::tell_death(process.keys, end.generation, failure);
    }
    comm::say_farewell(process.keys);
    finish(process, std::move(end));
  }

  void finish(Process& process, End end) {
    process.farewells_until.reset();
    if (process.is_over) return;  // it was waiting for farewells
    process.ends.push_back(std::move(end));
    process.is_over = true;
    if (process.number == 0 && hosts_store_ && !process.ends.back().lost_store) {
      process.farewells_until = now_ + kFarewellLimit;
    }
  }

  // The group is there. It may be made again, by all.
  void leave(Process& process) {
    process.making_until.reset();
    if (static_cast<int>(process.ends.size()) >= process.rounds) {
      process.is_over = true;
      return;
    }
    process.meeting.reset();
    process.saw_death.reset();
    process.arrives = now_ + milliseconds(random_.between(0, 100));
  }

  void await_farewells(Process& process) {
    if (now_ < process.next_look) return;
    process.next_look = now_ + kFarewellLook;
    std::vector<const Process*> here;
    for (const auto& other : all_) {
      if (other->has_arrived && !other->is_dead) here.push_back(other.get());
    }
    const bool is_told = comm::is_everybody_told(process.keys);
    if (!is_told && now_ < *process.farewells_until) return;
    for (const Process* other : here) {
      require(!is_told || other->is_over || other->is_dead || other->is_in_call,
              "the store stays until all who came have read why");
    }
    process.farewells_until.reset();
    store_ended_ = true;
  }

  static bool has_ended_well(const Process& process) {
    return process.is_over && static_cast<int>(process.ends.size()) == process.rounds &&
           !process.ends.back().failure && !process.ends.back().lost_store;
  }

  void check() {
    for (const auto& process : all_) {
      const bool came = process->has_arrived && !process->is_dead;
      require(!came || process->is_over, "who has come learns how it ends");
      for (const End& end : process->ends) check_end(*process, end);
    }
    check_one_text();
    if (!is_all_right()) return;
    for (const auto& process : all_) {
      require(has_ended_well(*process), "ranks that come in time meet");
    }
  }

  // What the ranks made of a generation, as the store has it.
  std::string outcome_of(std::int64_t generation) {
    constexpr comm::store::Client kNobody = ~0ULL;
    const std::string key = "generation/" + std::to_string(generation) + "/outcome";
    const auto ask = [&](Operation operation) {
      table_.serve(kNobody, {static_cast<std::uint8_t>(operation), {key}});
      return answers_.at(kNobody).parts.at(0);
    };
    return ask(Operation::kCheck) == "1" ? ask(Operation::kGet) : "";
  }

  // A rank may leave a meeting that has come to be: it saw one of those it was to meet dead before
  // it read the outcome. It must have seen that itself. Had it read of the death as the outcome,
  // there would have been two, and the others would have met without it.
  bool saw_death_first(const Process& process, const End& end, const End& theirs) {
    if (!theirs.failure || theirs.failure->kind() != FailureKind::kPeerLost) return false;
    return process.saw_death &&
           std::any_of(end.met.begin(), end.met.end(), [&](const auto& member) {
             return all_[static_cast<std::size_t>(member.second.pid - 1000)]->is_dead;
           });
  }

  void check_end(const Process& process, const End& end) {
    if (!end.met.empty()) {
      require(outcome_of(end.generation) == "met " + std::to_string(process.size),
              "who has met has it from the store");
      require(static_cast<int>(end.met.size()) == process.size, "who has met has met all");
      require(end.met.at(process.rank).pid == process.self.pid, "a rank is itself");
    }
    for (const auto& [rank, member] : end.met) {
      const Process& other = *all_[static_cast<std::size_t>(member.pid - 1000)];
      require(other.rank == rank && other.size == process.size, "they are who they say they are");
      bool has_met = other.is_dead;  // or was about to
      for (const End& theirs : other.ends) {
        if (theirs.generation != end.generation) continue;
        has_met |= theirs.lost_store || saw_death_first(other, end, theirs);
        if (theirs.met.empty()) continue;
        has_met = true;
        require(std::equal(end.met.begin(), end.met.end(), theirs.met.begin(), theirs.met.end(),
                           [](const auto& a, const auto& b) {
                             return a.first == b.first && a.second.pid == b.second.pid;
                           }),
                "all who meet meet the same");
      }
      require(has_met, "all meet or none does");
    }
    if (!end.failure) return;
    for (const int rank : end.failure->ranks()) check_blame(end, rank);
  }

  // Nobody is named who was there, or lives.
  void check_blame(const End& end, int rank) const {
    const bool is_death = end.failure->kind() == FailureKind::kPeerLost;
    auto first = Clock::time_point::max();
    for (const auto& process : all_) first = std::min(first, process->arrives_first);
    bool is_right = is_death ? false : true;
    for (const auto& process : all_) {
      if (process->rank != rank) continue;
      if (is_death) {
        is_right |= process->is_dead;
      } else if (process->ends.empty() || process->ends.front().generation == end.generation) {
        is_right &= end.generation > 0 || process->is_dead || process->store_ends ||
                    process->was_slow || process->arrives_first > first + limit_ - kNews ||
                    !process->has_arrived;
      }
    }
    require(is_right, is_death ? "who is said to be dead is" : "who came in time is not missed");
  }

  // Where none has met, all are told the same.
  void check_one_text() const {
    std::map<std::int64_t, std::set<std::string>> texts;
    std::map<std::int64_t, std::set<std::string>> deaths;
    std::set<std::int64_t> met;
    for (const auto& process : all_) {
      for (const End& end : process->ends) {
        if (!end.met.empty()) met.insert(end.generation);
        if (!end.failure) continue;
        texts[end.generation].insert(end.failure->what());
        if (end.failure->kind() == FailureKind::kPeerLost)
          deaths[end.generation].insert(end.failure->what());
      }
    }
    for (const auto& [generation, told] : texts) {
      require(met.contains(generation) || told.size() == 1, "a meeting fails for one reason");
    }
    for (const auto& [generation, told] : deaths) {
      require(told.size() == 1, "one death is told");
    }
  }

  bool is_all_right() const {
    auto first = Clock::time_point::max();
    auto last = Clock::time_point::min();
    std::set<int> ranks;
    for (const auto& process : all_) {
      if (process->dies || process->store_ends || process->was_slow) return false;
      if (process->size != all_.front()->size || !ranks.insert(process->rank).second) return false;
      first = std::min(first, process->arrives_first);
      last = std::max(last, process->arrives_first);
    }
    return static_cast<int>(ranks.size()) == all_.front()->size &&
           last != Clock::time_point::max() && last - first < limit_ - kNews;
  }

  void tell() const {
    for (const auto& process : all_) {
      std::printf("  process %llu, rank %d of %d%s:", (unsigned long long)process->number,
                  process->rank, process->size, process->is_dead ? ", dead" : "");
      for (const End& end : process->ends) {
        std::printf(" [%lld] %s", (long long)end.generation,
                    end.lost_store ? "no store"
                    : end.failure  ? end.failure->what()
                                   : "met");
      }
      std::printf("\n");
    }
  }

  Random random_;
  bool tells_;
  std::map<comm::store::Client, Packet> answers_;
  comm::store::Table table_{[this](comm::store::Client client, const Packet& answer) {
    answers_.insert_or_assign(client, answer);
  }};
  Clock::time_point now_{std::chrono::hours(1)};
  const Clock::time_point begin_ = now_;
  milliseconds limit_{};
  bool hosts_store_ = false;  // process 0 does, and takes it along
  bool store_ended_ = false;
  std::vector<std::unique_ptr<Process>> all_;
};

Packet Meetings::Keys::ask(Operation operation, std::vector<std::string> parts) {
  // Others come first, and the call takes its time; once in a while very long.
  const bool is_slow = world_.random_.one_in(1000);
  // Who is inside a call waits for those that began later.
  for (const auto& other : world_.all_) other->was_slow |= is_slow && other->is_in_call;
  const auto until = world_.now_ + milliseconds(is_slow ? world_.random_.between(200, 1200) : 0);
  if (is_slow || world_.random_.one_in(3)) {
    do {
      world_.now_ += milliseconds(1);
      world_.step(*world_.all_[world_.random_.below(world_.all_.size())]);
    } while (world_.now_ < until);
  }
  if (process_.dies && world_.now_ >= *process_.dies) throw Killed();
  const bool is_gone = process_.store_ends && world_.now_ >= *process_.store_ends;
  if (is_gone || world_.store_ended_) throw StoreGone("gone");
  world_.answers_.erase(process_.number);
  world_.table_.serve(process_.number, {static_cast<std::uint8_t>(operation), std::move(parts)});
  const auto answer = world_.answers_.find(process_.number);
  require(answer != world_.answers_.end(), "no one waits for a key that is not there");
  return answer->second;
}

}  // namespace

void run_meetings(std::uint64_t seed, bool tells) { Meetings(seed, tells).run(); }

}  // namespace tessera::simulator
