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
#include "comm/gloo/gloo_transport.h"
#include "comm/hierarchical_transport.h"
#include "comm/meeting.h"
#include "comm/network.h"
#include "comm/obituary.h"
#include "comm/shm/shm_transport.h"
#include "comm/side_thread.h"
#include "comm/store/auth_store.h"
#include "comm/store_keys.h"
#include "tessera/core/check.h"

namespace tessera::comm {
namespace {

// How often the one who waits for a group to be made looks for members that have died.
constexpr auto kDeathInterval = std::chrono::milliseconds(50);
// The thread that makes it may know more of a death: it gets this long to say so.
constexpr auto kMakerFirst = std::chrono::milliseconds(100);
// How long the store may take to tell which of several deaths came first.
constexpr auto kAgreementLimit = std::chrono::milliseconds(500);

// What the thread that makes a group tells the one that waits for it.
class Making {
 public:
  std::atomic<bool> has_met{false};  // all ranks have come
  std::atomic<std::int64_t> generation{-1};
  c10::intrusive_ptr<EngineBackend> engine;
  int gpus_for_nccl = 0;  // of this process

  void note(const std::map<int, Member>& came) {
    const std::lock_guard lock(mutex_);
    came_ = came;
  }

  // Members that this process knows, by group rank.
  std::map<int, Member> known(const GroupOptions& options) {
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
    return known;
  }

  // A member that has died, if one on this host has.
  std::optional<Failure> find_death(const GroupOptions& options, const Member& self) {
    for (const auto& [rank, member] : known(options)) {
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

// Waits until all ranks are there; returns who they are.
std::vector<Member> meet(c10d::Store& store, int rank, int size, const Member& self,
                         const GroupOptions& options, Making& making) {
  StoreKeys keys(store);
  Meeting meeting(
      {.rank = rank, .size = size, .group_name = options.name, .limit = options.timeout}, self,
      Clock::now());
  meeting.arrive(keys);
  making.generation = *meeting.generation();
  try {
    while (!meeting.look(keys, Clock::now())) {
      making.note(meeting.known());
      std::this_thread::sleep_for(meeting.pause());
    }
  } catch (const Failure& failure) {
    if (failure.kind() == FailureKind::kPeerLost) throw;
    throw Error(ErrorKind::kRendezvous, failure.ranks(), failure.what());
  }
  making.note(meeting.known());
  making.has_met = true;
  std::vector<Member> members;
  for (const auto& [other, member] : meeting.known()) members.push_back(member);
  return members;
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

// Nobody is left to hear it if this fails.
void try_to_say_farewell(c10d::Store& store) noexcept {
  try {
    StoreKeys keys(store);
    say_farewell(keys);
  } catch (const std::exception&) {
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
  Member self = this_process(options.world_ranks.empty() ? rank : options.world_ranks[rank]);
  self.gpus_for_nccl = making.gpus_for_nccl;
  if (options.world_ranks.empty()) remember_store(store, self);
  auto members = meet(*store, rank, size, self, options, making);
  auto monitor = std::make_shared<GroupMonitor>(std::move(members), rank, options.name);
  const auto own_store = c10::make_intrusive<c10d::PrefixStore>(
      "generation/" + std::to_string(making.generation), store);
  auto transport = make_transport(own_store, monitor, options);
  note_new_group(*store);
  if (options.world_ranks.empty()) Making::set_world(monitor);
  return c10::make_intrusive<EngineBackend>(std::move(transport), std::move(monitor),
                                            options.timeout);
}

// What all ranks are told of a death that this one has seen; see tell_death.
Failure first_death(const c10::intrusive_ptr<c10d::Store>& store, const Making& making,
                    const Failure& mine) {
  auto told = std::make_shared<std::optional<Failure>>();
  const std::int64_t generation = making.generation;
  try {
    auto end = run_beside([=] {
      // A connection of its own: the thread that makes the group may wait for the dead on the
      // other.
      const auto own = store->clone();
      StoreKeys keys(*own);
      *told = tell_death(keys, generation < 0 ? std::nullopt : std::optional(generation), mine);
      say_farewell(keys);
    });
    if (end.wait_for(kAgreementLimit) != std::future_status::ready) {
      abandon_side_thread();
      return mine;
    }
    end.get();
  } catch (const std::exception&) {
    return mine;  // the store is gone, or there is no thread to ask it
  }
  return **told;
}

// Joins beside the calling thread: a store that is reached but does not answer would hold this one
// for good, since LibTorch's client waits for it without a limit, and so would Gloo with a peer
// that has died. Returns nothing in the first case, and throws in the second.
c10::intrusive_ptr<EngineBackend> join_within_limit(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size, const GroupOptions& options,
                                                    const std::shared_ptr<Making>& making) {
  // More than the limit, so that whoever finds ranks missing can say so first.
  const auto limit = options.timeout + std::chrono::seconds(1);
  const Member self = this_process(rank);
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
    const auto last_look = Clock::now() + std::chrono::milliseconds(500);
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
    StoreKeys keys(store);
    while (Clock::now() < limit) {
      if (is_everybody_told(keys)) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  } catch (const std::exception&) {
    // The store is gone already.
  }
}

c10::intrusive_ptr<EngineBackend> make_engine(const c10::intrusive_ptr<c10d::Store>& store,
                                              int rank, int size, const GroupOptions& options,
                                              int gpus_for_nccl) {
  const auto silent_store = [&] {
    return Error(ErrorKind::kRendezvous, {},
                 "comm.init: group '" + options.name + "' cannot be made: the store" +
                     place_of(store) + " does not answer. Groups that exist go on; new ones need " +
                     "it. Look at the process that hosts it: the launcher, or rank 0.");
  };
  // Without this, a rank that cannot look up its host would take itself for one of another, and
  // shared memory would seem to lack memory.
  constexpr std::size_t kFilesOfAGroup = 16;
  make_room_for_files(kFilesOfAGroup, "group '" + options.name + "'");
  const auto making = std::make_shared<Making>();
  making->gpus_for_nccl = gpus_for_nccl;
  try {
    if (auto engine = join_within_limit(store, rank, size, options, making)) return engine;
  } catch (const Failure& failure) {
    if (failure.kind() == FailureKind::kPeerLost && !failure.ranks().empty()) {
      const Failure first =
          in_first_words(first_death(store, *making, failure), making->known(options));
      // Something else may have ended the meeting before.
      const bool is_death = first.kind() == FailureKind::kPeerLost;
      throw Error(is_death ? ErrorKind::kPeerLost : ErrorKind::kRendezvous, first.ranks(),
                  first.what());
    }
    try_to_say_farewell(*store);
    throw Error(error_kind(failure.kind()), failure.ranks(), failure.what());
  } catch (const Error&) {
    try_to_say_farewell(*store);
    throw;
  } catch (const ConnectionLost& lost) {
    try_to_say_farewell(*store);
    throw Error(ErrorKind::kRendezvous, {}, lost.what());
  } catch (const c10::DistError&) {
    // What LibTorch throws here is a page of stack that ends in "Broken pipe".
    throw silent_store();
  }
  throw silent_store();
}

}  // namespace tessera::comm
