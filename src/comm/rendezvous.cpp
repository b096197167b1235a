#include "comm/rendezvous.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/call_exchange.h"
#include "comm/gloo_transport.h"
#include "comm/hierarchical_transport.h"
#include "comm/network.h"
#include "comm/obituary.h"
#include "comm/shm/shm_transport.h"
#include "comm/side_thread.h"
#include "comm/store/auth_store.h"
#include "tessera/core/check.h"

namespace tessera::comm {
namespace {

constexpr const char* kFaultKey = "fault";
constexpr const char* kFarewellKey = "farewell";
constexpr const char* kArrivalsKey = "arrivals";
constexpr const char* kLostKey = "lost";
// How often the one who waits for a group to be made looks for members that have died.
constexpr auto kDeathInterval = std::chrono::milliseconds(50);
// The thread that makes it may know more of a death: it gets this long to say so.
constexpr auto kMakerFirst = std::chrono::milliseconds(100);
// How long a broken connection waits for a death that explains it.
constexpr auto kBreakFirst = std::chrono::milliseconds(500);
// How long the store may take to tell which of several deaths came first.
constexpr auto kAgreementLimit = std::chrono::milliseconds(500);

// What the thread that makes a group tells the one that waits for it.
class Making {
 public:
  std::atomic<bool> has_met{false};  // all ranks have come
  c10::intrusive_ptr<EngineBackend> engine;

  void note(int rank, const Member& member) {
    const std::lock_guard lock(mutex_);
    came_.insert_or_assign(rank, member);
  }

  // A member that has died, if one on this host has.
  std::optional<Failure> find_death(const GroupOptions& options, const Member& self) {
    std::map<int, Member> known;
    // A rank that is yet to come is known as a rank of the world.
    if (const auto world = world_.lock()) {
      for (std::size_t r = 0; r < options.world_ranks.size(); ++r) {
        const int world_rank = options.world_ranks[r];
        if (world_rank < static_cast<int>(world->members().size())) {
          known.emplace(static_cast<int>(r), world->members()[world_rank]);
        }
      }
    }
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [rank, member] : came_) known.insert_or_assign(rank, member);
    }
    for (const auto& [rank, member] : known) {
      if (member.host == self.host && member.pid != self.pid && has_ended(member)) {
        return death_in_creation(member, rank);
      }
    }
    return std::nullopt;
  }

  // The group of all ranks, made last in this process.
  static void set_world(const std::shared_ptr<GroupMonitor>& world) {
    const std::lock_guard lock(world_mutex());
    last_world() = world;
  }

 private:
  static std::mutex& world_mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::weak_ptr<GroupMonitor>& last_world() {
    static auto* world = new std::weak_ptr<GroupMonitor>;
    return *world;
  }

  std::mutex mutex_;
  std::map<int, Member> came_;  // by group rank
  std::weak_ptr<GroupMonitor> world_ = [] {
    const std::lock_guard lock(world_mutex());
    return last_world();
  }();
};

std::string member_key(std::int64_t generation, int rank) {
  return "generation/" + std::to_string(generation) + "/member/" + std::to_string(rank);
}

// Raises `text` here and, through the store, on every rank that still waits.
[[noreturn]] void raise_everywhere(c10d::Store& store, const std::string& text) {
  const std::vector<std::uint8_t> bytes(text.begin(), text.end());
  store.compareSet(kFaultKey, std::vector<std::uint8_t>{}, bytes);
  throw Error(ErrorKind::kRendezvous, {}, get_text(store, kFaultKey));
}

// Takes this rank's place; returns how often it was taken before, by this process.
std::int64_t claim_rank(c10d::Store& store, int rank, const Member& self) {
  store.add(kArrivalsKey, 1);
  const std::int64_t generation = store.add("claim/" + std::to_string(rank), 1) - 1;
  if (generation > 0) {
    const Member earlier = decode_member(get_text(store, member_key(generation - 1, rank)));
    if (earlier.pid != self.pid || earlier.start_time != self.start_time ||
        earlier.host != self.host) {
      raise_everywhere(store, "comm.init: two processes claim rank " + std::to_string(rank) +
                                  ": pid " + std::to_string(earlier.pid) + " on host " +
                                  earlier.host_name + " and pid " + std::to_string(self.pid) +
                                  " on host " + self.host_name +
                                  ". Give every process its own RANK.");
    }
  }
  return generation;
}

// Waits until all ranks of the generation have written their record.
std::vector<Member> gather_members(c10d::Store& store, std::int64_t generation, int size,
                                   const GroupOptions& options, Making& making) {
  const auto begin = Clock::now();
  const auto deadline = begin + options.timeout;
  auto pause = std::chrono::microseconds(100);
  auto noted = begin;
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) keys.push_back(member_key(generation, rank));
  while (!store.check(keys)) {
    if (store.check({kFaultKey})) {
      throw Error(ErrorKind::kRendezvous, {}, get_text(store, kFaultKey));
    }
    if (Clock::now() - noted >= 5 * kDeathInterval) {
      noted = Clock::now();
      for (int rank = 0; rank < size; ++rank) {
        if (store.check({keys[rank]})) {
          making.note(rank, decode_member(get_text(store, keys[rank])));
        }
      }
    }
    if (Clock::now() >= deadline) {
      std::vector<int> missing;
      for (int rank = 0; rank < size; ++rank) {
        if (!store.check({keys[rank]})) missing.push_back(rank);
      }
      if (missing.empty()) continue;
      throw Error(ErrorKind::kRendezvous, missing,
                  "comm.init: " + list_ranks(missing) + " of " + std::to_string(size) +
                      " did not join group '" + options.name + "' within " +
                      std::to_string(options.timeout.count() / 1000.0).substr(0, 5) +
                      " s. Check that all ranks were started with the same WORLD_SIZE, "
                      "MASTER_ADDR and MASTER_PORT.");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(pause * 2, std::chrono::milliseconds(20));
  }
  std::vector<Member> members;
  for (int rank = 0; rank < size; ++rank) {
    members.push_back(decode_member(get_text(store, keys[rank])));
    making.note(rank, members.back());
  }
  return members;
}

// The group sizes that the ranks were told; they must be one.
void check_sizes(c10d::Store& store, std::int64_t generation, int rank, int size) {
  for (int other = 0; other < size; ++other) {
    const std::string theirs = get_text(store, member_key(generation, other) + "/size");
    if (theirs != std::to_string(size)) {
      raise_everywhere(store, "comm.init: rank " + std::to_string(rank) + " expects " +
                                  std::to_string(size) + " ranks, rank " + std::to_string(other) +
                                  " expects " + theirs +
                                  ". Give every process the same "
                                  "WORLD_SIZE.");
    }
  }
}

std::shared_ptr<Transport> make_transport(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::shared_ptr<GroupMonitor>& monitor,
                                          const GroupOptions& options) {
  const auto& members = monitor->members();
  const int rank = monitor->rank();
  const int size = static_cast<int>(members.size());
  std::map<std::string, std::vector<int>> hosts;
  for (int r = 0; r < size; ++r) hosts[members[r].host].push_back(r);
  const bool is_one_host = hosts.size() == 1;
  const bool has_neighbours = std::any_of(hosts.begin(), hosts.end(),
                                          [](const auto& host) { return host.second.size() > 1; });
  const std::string address = is_one_host ? "127.0.0.1" : address_towards_peers();
  const auto deadline = Clock::now() + options.timeout;
  const auto make_gloo = [&]() -> std::shared_ptr<Transport> {
    // Beside the connections to all ranks: listeners, the comparison of calls, the store. Without
    // this, Gloo would say that it cannot resolve the address.
    constexpr std::size_t kOtherFiles = 48;
    make_room_for_files(static_cast<std::size_t>(size) + kOtherFiles,
                        "Gloo between " + std::to_string(size) + " ranks");
    const auto channel = make_channel(store, *monitor, address);
    auto transport = std::make_shared<GlooTransport>(store, monitor, channel, options.timeout,
                                                     address, options.check_gloo_calls);
    channel->meet(*store);  // Gloo has met, so all channels are there
    return transport;
  };
  if (options.engine == Engine::kGloo) return make_gloo();
  if (!is_one_host && !has_neighbours) {
    TESSERA_CHECK_VALUE(options.engine != Engine::kShm,
                        "comm.init: engine 'shm' needs ranks that share a host; group '",
                        options.name, "' has one rank on each of ", hosts.size(), " hosts.");
    return make_gloo();
  }
  try {
    if (is_one_host) {
      StoreBootstrap bootstrap(c10::make_intrusive<c10d::PrefixStore>("shm", store));
      return shm::ShmTransport::create(rank, size, bootstrap, *monitor, {.deadline = deadline});
    }
    return HierarchicalTransport::create(store, monitor, options, address, deadline);
  } catch (const Failure& failure) {
    if (failure.kind() != FailureKind::kUnavailable) throw;
    if (options.engine == Engine::kShm) throw;
    if (rank == 0) {
      std::fprintf(stderr,
                   "[tessera] group '%s' uses Gloo over TCP instead of shared memory, which is "
                   "slower: %s\n",
                   options.name.c_str(), failure.what());
    }
    return make_gloo();
  }
}

// " at host:port", if the store has such a place.
std::string place_of(const c10::intrusive_ptr<c10d::Store>& store) {
  c10::intrusive_ptr<c10d::Store> inner = store;
  while (auto prefixed = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(inner)) {
    inner = prefixed->getUnderlyingStore();
  }
  if (const auto own = c10::dynamic_intrusive_pointer_cast<store::AuthStore>(inner)) {
    return " at " + own->place().text();
  }
  const auto tcp = c10::dynamic_intrusive_pointer_cast<c10d::TCPStore>(inner);
  if (!tcp) return "";
  return " at " + tcp->getHost() + ":" + std::to_string(tcp->getPort());
}

// Says that this rank has read why the group cannot be made.
void say_farewell(c10d::Store& store) noexcept {
  try {
    store.add(kFarewellKey, 1);
  } catch (const std::exception&) {
    // Nobody is left to hear it.
  }
}

// Once all ranks have come, what still waits for the store, or for Gloo, gets the limit anew.
c10::intrusive_ptr<EngineBackend> join(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                       int size, const GroupOptions& options, Making& making) {
  TESSERA_CHECK_VALUE(size >= 1, "comm.init: a group has at least one rank, not ", size, ".");
  TESSERA_CHECK_VALUE(rank >= 0 && rank < size, "comm.init: rank ", rank, " is outside a group of ",
                      size, " (0 to ", size - 1, ").");
  TESSERA_CHECK_VALUE(
      options.world_ranks.empty() || options.world_ranks.size() == static_cast<std::size_t>(size),
      "comm.init: ", options.world_ranks.size(), " world ranks were given for a group of ", size,
      ".");
  const Member self = this_process(options.world_ranks.empty() ? rank : options.world_ranks[rank]);
  const std::int64_t generation = claim_rank(*store, rank, self);
  const std::string key = member_key(generation, rank);
  set_text(*store, key + "/size", std::to_string(size));
  set_text(*store, key, encode(self));
  auto members = gather_members(*store, generation, size, options, making);
  making.has_met = true;
  check_sizes(*store, generation, rank, size);
  auto monitor = std::make_shared<GroupMonitor>(std::move(members), rank, options.name);
  const auto own_store =
      c10::make_intrusive<c10d::PrefixStore>("generation/" + std::to_string(generation), store);
  auto transport = make_transport(own_store, monitor, options);
  if (options.world_ranks.empty()) {
    Making::set_world(monitor);
    remember_store(store);
  }
  return c10::make_intrusive<EngineBackend>(std::move(transport), std::move(monitor),
                                            options.timeout);
}

// The first death that any rank has told the store of, which is this one if none has: survivors end
// because of it, and would be taken for the cause by those who look later.
Failure first_death(const c10::intrusive_ptr<c10d::Store>& store, const Failure& mine) {
  auto told = std::make_shared<std::string>();
  auto end = run_beside([=] {
    const std::string text = std::to_string(mine.ranks().at(0)) + " " + mine.what();
    // A connection of its own: the thread that makes the group may wait for the dead on the other.
    const auto own = store->clone();
    own->compareSet(kLostKey, std::vector<std::uint8_t>{},
                    std::vector<std::uint8_t>(text.begin(), text.end()));
    *told = get_text(*own, kLostKey);
    say_farewell(*own);
  });
  if (end.wait_for(kAgreementLimit) != std::future_status::ready) {
    abandon_side_thread();
    return mine;
  }
  try {
    end.get();
  } catch (const std::exception&) {
    return mine;  // the store is gone
  }
  const std::size_t space = told->find(' ');
  if (space == std::string::npos) return mine;
  return {FailureKind::kPeerLost, {std::atoi(told->c_str())}, told->substr(space + 1)};
}

// Joins beside the calling thread: a store that is reached but does not answer would hold this one
// for good, since LibTorch's client waits for it without a limit, and so would Gloo with a peer
// that has died. Returns nothing in the first case, and throws in the second.
c10::intrusive_ptr<EngineBackend> join_within_limit(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    const GroupOptions& options) {
  // More than the limit, so that whoever finds ranks missing can say so first.
  const auto limit = options.timeout + std::chrono::seconds(1);
  const Member self = this_process(rank);
  auto making = std::make_shared<Making>();
  auto end = run_beside([=] { making->engine = join(store, rank, size, options, *making); });
  const auto has_ended_within = [&](auto time) {
    return end.wait_for(time) == std::future_status::ready;
  };
  auto until = Clock::now() + limit;
  bool is_longer = false;
  while (!has_ended_within(kDeathInterval)) {
    if (const auto death = making->find_death(options, self)) {
      if (has_ended_within(kMakerFirst)) break;
      abandon_side_thread();
      throw *death;
    }
    if (Clock::now() < until) continue;
    if (is_longer || !making->has_met) {
      abandon_side_thread();
      return nullptr;
    }
    is_longer = true;
    until = Clock::now() + limit;
  }
  try {
    end.get();
  } catch (const Failure&) {
    throw;
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    // A connection breaks before the death behind it can be seen.
    const auto last_look = Clock::now() + kBreakFirst;
    do {
      if (const auto death = making->find_death(options, self)) throw *death;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    } while (Clock::now() < last_look);
    throw;
  }
  return std::move(making->engine);
}

}  // namespace

std::string get_text(c10d::Store& store, const std::string& key) {
  const auto bytes = store.get(key);
  return {bytes.begin(), bytes.end()};
}

void set_text(c10d::Store& store, const std::string& key, const std::string& value) {
  store.set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
}

std::shared_ptr<FailureChannel> make_channel(const c10::intrusive_ptr<c10d::Store>& store,
                                             GroupMonitor& monitor, const std::string& address) {
  auto channel = std::make_shared<FailureChannel>(
      store, monitor.rank(), static_cast<int>(monitor.members().size()), address);
  monitor.set_poll([channel] { return channel->poll(); });
  monitor.set_roll_call(
      [channel](std::uint64_t sequence, bool asks) { return channel->call_roll(sequence, asks); });
  return channel;
}

void StoreBootstrap::set(const std::string& key, const std::string& value) {
  set_text(*store_, key, value);
}

std::string StoreBootstrap::get(const std::string& key, Clock::time_point deadline) {
  auto pause = std::chrono::microseconds(50);
  while (!store_->check({key})) {
    if (Clock::now() >= deadline) {
      throw Failure(FailureKind::kTimeout, {},
                    "comm.init: no word from the other ranks on '" + key + "' within the limit.");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(pause * 2, std::chrono::milliseconds(10));
  }
  return get_text(*store_, key);
}

void await_farewells(c10d::Store& store, Clock::time_point limit) noexcept {
  try {
    while (Clock::now() < limit) {
      if (store.add(kFarewellKey, 0) >= store.add(kArrivalsKey, 0)) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  } catch (const std::exception&) {
    // The store is gone already.
  }
}

c10::intrusive_ptr<EngineBackend> make_engine(const c10::intrusive_ptr<c10d::Store>& store,
                                              int rank, int size, const GroupOptions& options) {
  const auto silent_store = [&] {
    return Error(ErrorKind::kRendezvous, {},
                 "comm.init: group '" + options.name + "' cannot be made: the store" +
                     place_of(store) + " does not answer. Groups that exist go on; new ones need " +
                     "it. Look at the process that hosts it: the launcher, or rank 0.");
  };
  try {
    if (auto engine = join_within_limit(store, rank, size, options)) return engine;
  } catch (const Failure& failure) {
    if (failure.kind() == FailureKind::kPeerLost && !failure.ranks().empty()) {
      const Failure first = in_first_words(first_death(store, failure));
      throw Error(ErrorKind::kPeerLost, first.ranks(), first.what());
    }
    say_farewell(*store);
    throw Error(error_kind(failure.kind()), failure.ranks(), failure.what());
  } catch (const Error&) {
    say_farewell(*store);
    throw;
  } catch (const ConnectionLost& lost) {
    say_farewell(*store);
    throw Error(ErrorKind::kRendezvous, {}, lost.what());
  } catch (const c10::DistError&) {
    // What LibTorch throws here is a page of stack that ends in "Broken pipe".
    throw silent_store();
  }
  throw silent_store();
}

}  // namespace tessera::comm
