#include "comm/obituary.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/side_thread.h"

namespace tessera::comm {
namespace {

constexpr auto kLimit = std::chrono::milliseconds(200);

struct Memory {
  std::mutex mutex;
  c10::weak_intrusive_ptr<c10d::Store> store{c10::intrusive_ptr<c10d::Store>()};
  std::map<std::string, std::string> words;  // of deaths this process has told already
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

}  // namespace

void remember_store(const c10::intrusive_ptr<c10d::Store>& store) {
  // The prefixes of a group differ from those of the next.
  c10::intrusive_ptr<c10d::Store> root = store;
  while (auto prefixed = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(root)) {
    root = prefixed->getUnderlyingStore();
  }
  const std::lock_guard lock(memory().mutex);
  memory().store = c10::weak_intrusive_ptr<c10d::Store>(root);
}

Failure in_first_words(const Failure& failure) noexcept {
  try {
    const std::string dead = dead_in(failure);
    if (dead.empty()) return failure;
    c10::intrusive_ptr<c10d::Store> store;
    {
      const std::lock_guard lock(memory().mutex);
      const auto known = memory().words.try_emplace(dead, failure.what());
      if (!known.second) return {failure.kind(), failure.ranks(), known.first->second};
      store = memory().store.lock();
    }
    if (!store) return failure;
    auto told = std::make_shared<std::string>();
    auto end = run_beside([=, words = std::string(failure.what())] {
      // The connection may be inside a long wait of another thread.
      const auto own = store->clone();
      const std::vector<std::uint8_t> first =
          own->compareSet("tessera/death of " + dead, std::vector<std::uint8_t>{},
                          std::vector<std::uint8_t>(words.begin(), words.end()));
      told->assign(first.begin(), first.end());
    });
    if (end.wait_for(kLimit) != std::future_status::ready) {
      abandon_side_thread();
      return failure;
    }
    end.get();
    Failure first(failure.kind(), failure.ranks(), *told);
    if (dead_in(first) != dead) return failure;
    const std::lock_guard lock(memory().mutex);
    memory().words[dead] = *told;
    return first;
  } catch (const std::exception&) {
    return failure;  // the store is gone
  }
}

}  // namespace tessera::comm
