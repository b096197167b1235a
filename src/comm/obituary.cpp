#include "comm/obituary.h"

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/side_thread.h"
#include "tessera/comm/environment.h"

namespace tessera::comm {
namespace {

constexpr auto kLimit = std::chrono::milliseconds(200);

struct Memory {
  std::mutex mutex;
  c10::weak_intrusive_ptr<c10d::Store> store{c10::intrusive_ptr<c10d::Store>()};
  std::string job;                           // before the keys: a store outlives an attempt
  std::string self;                          // as others would describe this process
  std::map<std::string, std::string> words;  // of deaths this process has told already
  bool has_told = false;
};

Memory& memory() {
  static auto* memory = new Memory;  // never destroyed: groups may outlive static destructors
  return *memory;
}

// "rank 2 (pid 4711, host a)", which every text about a death holds; empty if it is about none.
std::string dead_in(const Failure& failure) {
  if (failure.kind() != FailureKind::kPeerLost || failure.ranks().size() != 1) return "";
  const std::string text = failure.what();
  const std::size_t end = text.find(") died ");
  const std::size_t begin = end == std::string::npos ? end : text.rfind("rank ", end);
  return begin == std::string::npos ? "" : text.substr(begin, end + 1 - begin);
}

// `words` of a death; whoever in the group died is found by who they are.
Failure told_as(const std::string& words, const Failure& failure,
                const std::map<int, Member>& members) {
  const Failure same(failure.kind(), failure.ranks(), words);
  const std::string dead = dead_in(same);
  if (dead == dead_in(failure)) return same;
  std::vector<int> ranks;
  for (const auto& [rank, member] : members) {
    if (member.describe() == dead) ranks.push_back(rank);
  }
  return {failure.kind(), ranks, words};
}

std::string text_of(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::string told_by(const std::string& job, const std::string& rank) {
  return job + "death told by " + rank;
}

// Each attempt of a job has processes of its own, and one of them may have the rank and the number
// of another's.
std::string this_job() {
  try {
    const Environment environment = read_environment();
    return "tessera/" + environment.run_id + "/" + std::to_string(environment.restart_count) + "/";
  } catch (const std::exception&) {
    return "tessera/";  // a group of ranks that no launcher started
  }
}

// The first words of the job about the death that `failure` is about, or that is behind it.
std::string ask_first_words(c10d::Store& store, const Failure& failure, const std::string& job,
                            const std::string& self) {
  std::string words = failure.what();
  std::string dead = dead_in(failure);
  // At most once for every rank: nobody tells of a death that came later than its own.
  std::set<std::string> seen;
  while (seen.insert(dead).second) {
    const std::string key = told_by(job, dead);
    if (!store.check({key})) break;
    const std::string behind = text_of(store.get(key));
    const std::string other = dead_in(Failure(failure.kind(), {0}, behind));
    if (other.empty()) break;  // it went on after what it told
    words = behind;
    dead = other;
  }
  words = text_of(store.compareSet(job + "death of " + dead, {}, bytes_of(words)));
  // Before this process ends.
  if (!self.empty()) store.set(told_by(job, self), bytes_of(words));
  return words;
}

}  // namespace

void remember_store(const c10::intrusive_ptr<c10d::Store>& store, const Member& self) {
  // The prefixes of a group differ from those of the next.
  c10::intrusive_ptr<c10d::Store> root = store;
  while (auto prefixed = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(root)) {
    root = prefixed->getUnderlyingStore();
  }
  const std::lock_guard lock(memory().mutex);
  memory().store = c10::weak_intrusive_ptr<c10d::Store>(root);
  memory().job = this_job();
  memory().self = self.describe();
}

void note_new_group(c10d::Store& store) {
  std::string key;
  {
    const std::lock_guard lock(memory().mutex);
    if (!std::exchange(memory().has_told, false)) return;
    key = told_by(memory().job, memory().self);
  }
  c10d::Store* root = &store;
  while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(root)) {
    root = prefixed->getUnderlyingStore().get();
  }
  root->set(key, bytes_of("went on"));
}

Failure in_first_words(const Failure& failure, const std::map<int, Member>& members) noexcept {
  try {
    const std::string dead = dead_in(failure);
    if (dead.empty()) return failure;
    c10::intrusive_ptr<c10d::Store> store;
    std::string job;
    std::string self;
    {
      const std::lock_guard lock(memory().mutex);
      const auto known = memory().words.try_emplace(dead, failure.what());
      if (!known.second) return told_as(known.first->second, failure, members);
      store = memory().store.lock();
      job = memory().job;
      self = memory().self;
      memory().has_told = true;
    }
    if (!store) return failure;
    auto told = std::make_shared<std::string>();
    auto end = run_beside([=] {
      // The connection may be inside a long wait of another thread.
      *told = ask_first_words(*store->clone(), failure, job, self);
    });
    if (end.wait_for(kLimit) != std::future_status::ready) {
      abandon_side_thread();
      return failure;
    }
    end.get();
    Failure first = told_as(*told, failure, members);
    if (dead_in(Failure(failure.kind(), {0}, *told)).empty()) return failure;
    const std::lock_guard lock(memory().mutex);
    memory().words[dead] = *told;
    return first;
  } catch (const std::exception&) {
    return failure;  // the store is gone, or there is no thread to ask it
  }
}

}  // namespace tessera::comm
