// Parts of an id table on changing numbers of ranks, killed and loaded again, against a plain map:
// no id is lost, doubled, or counted wrongly. TESSERA_ID_OPERATIONS=100000000 makes it longer.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include "tessera/collision/id_table.h"

namespace tessera::collision {
namespace {

struct Known {
  std::int64_t count = 0;
  std::int64_t last_step = 0;
};
using Model = std::unordered_map<std::int64_t, Known>;

std::int64_t operations() {
  const char* wanted = std::getenv("TESSERA_ID_OPERATIONS");
  return wanted == nullptr ? 1'000'000 : std::atoll(wanted);
}

/// The parts of one table on so many ranks.
class World {
 public:
  explicit World(int num_ranks) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      IdTableOptions options;
      options.first_bucket = kNumBuckets * rank / num_ranks;
      options.end_bucket = kNumBuckets * (rank + 1) / num_ranks;
      parts_.push_back(std::make_unique<IdTable>(options));
    }
  }

  /// What all ranks save, in order of the buckets.
  IdList save() const {
    IdList all;
    const auto add = [](std::vector<std::int64_t>& to, const std::vector<std::int64_t>& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    for (const auto& part : parts_) {
      const IdList own = part->export_ids();
      add(all.ids, own.ids);
      add(all.counts, own.counts);
      add(all.last_steps, own.last_steps);
    }
    return all;
  }
  void load(const IdList& list) {
    std::vector<IdList> own(parts_.size());
    for (std::size_t i = 0; i < list.ids.size(); ++i) {
      IdList& to = own[owner_of(list.ids[i])];
      to.ids.push_back(list.ids[i]);
      to.counts.push_back(list.counts[i]);
      to.last_steps.push_back(list.last_steps[i]);
    }
    for (std::size_t rank = 0; rank < parts_.size(); ++rank) {
      parts_[rank]->load(own[rank].ids, own[rank].counts, own[rank].last_steps);
    }
  }

  void admit(const std::vector<std::int64_t>& ids, std::int64_t step, bool is_undone) {
    const auto dealt = deal(ids);
    for (std::size_t rank = 0; rank < parts_.size(); ++rank) {
      std::vector<std::int64_t> rows(dealt[rank].size());
      IdTable& part = *parts_[rank];
      part.plan_admit(dealt[rank], {}, step, rows);
      is_undone ? part.undo_admitted() : part.keep_admitted();
      if (is_undone) continue;
      for (std::size_t i = 0; i < rows.size(); ++i) ASSERT_EQ(part.id_of(rows[i]), dealt[rank][i]);
    }
  }
  void erase(const std::vector<std::int64_t>& ids) {
    const auto dealt = deal(ids);
    for (std::size_t rank = 0; rank < parts_.size(); ++rank) parts_[rank]->erase(dealt[rank]);
  }

  void check(const Model& model, const std::vector<std::int64_t>& ids) const {
    for (const std::int64_t id : ids) {
      const IdTable& part = *parts_[owner_of(id)];
      std::int64_t row = 0;
      part.find({&id, 1}, {&row, 1});
      const auto known = model.find(id);
      ASSERT_EQ(row >= 0, known != model.end()) << id;
      if (row < 0) continue;
      ASSERT_EQ(part.count_of(row), known->second.count) << id;
      ASSERT_EQ(part.last_step_of(row), known->second.last_step) << id;
    }
  }
  void check_all(const Model& model) const {
    const IdList list = save();
    ASSERT_EQ(list.ids.size(), model.size());
    check(model, list.ids);
  }

 private:
  std::size_t owner_of(std::int64_t id) const {
    const int bucket = bucket_of(id);
    std::size_t rank = 0;
    while (parts_[rank]->options().end_bucket <= bucket) ++rank;
    return rank;
  }
  std::vector<std::vector<std::int64_t>> deal(const std::vector<std::int64_t>& ids) const {
    std::vector<std::vector<std::int64_t>> dealt(parts_.size());
    for (const std::int64_t id : ids) dealt[owner_of(id)].push_back(id);
    return dealt;
  }

  std::vector<std::unique_ptr<IdTable>> parts_;
};

TEST(IdResharding, NothingIsLostOrDoubled) {
  std::mt19937_64 random(3);
  const auto draw = [&]() -> std::int64_t {
    const std::uint64_t number = random();
    // Many ids again and again, some never again, the ends of the range among them.
    constexpr auto kLowest = std::numeric_limits<std::int64_t>::min();
    if (number % 997 == 0) return kLowest + static_cast<std::int64_t>(number & 1024);
    if (number % 991 == 0) return ~(kLowest + static_cast<std::int64_t>(number & 1024));
    const auto spread = std::int64_t{1} << (10 + number % 6 * 2);
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(spread)) - spread / 2;
  };
  auto world = std::make_unique<World>(2);
  Model model;
  IdList saved;
  Model saved_model;
  std::int64_t saved_step = 0;
  std::int64_t step = 0;
  std::int64_t since_check = 0;
  // Saves, kills and moves cost as much as the table holds: some 120 of them, however long the run.
  const auto eventful = static_cast<std::uint64_t>(120 * 1'500'000'000LL / operations());
  const auto check_every = std::max<std::int64_t>(200'000, operations() / 200);
  std::int64_t num_killed = 0;
  std::int64_t num_moved = 0;
  for (std::int64_t done = 0; done < operations();) {
    std::vector<std::int64_t> ids(1 + random() % 3000);
    for (std::int64_t& id : ids) id = draw();
    done += static_cast<std::int64_t>(ids.size());
    since_check += static_cast<std::int64_t>(ids.size());
    const bool is_event = random() % 1'000'000 < eventful;
    const std::uint64_t action = is_event ? 82 + random() % 18 : random() % 82;
    if (action < 70) {
      world->admit(ids, ++step, /*is_undone=*/false);
      for (const std::int64_t id : ids) {
        Known& known = model[id];
        ++known.count;
        known.last_step = step;
      }
    } else if (action < 76) {
      world->admit(ids, step + 1, /*is_undone=*/true);
    } else if (action < 82) {
      ids.resize(ids.size() / 4);
      world->erase(ids);
      for (const std::int64_t id : ids) model.erase(id);
    } else if (action < 88) {
      saved = world->save();
      saved_model = model;
      saved_step = step;
    } else if (action < 94) {
      // Killed: back to what was saved, on another number of ranks.
      world = std::make_unique<World>(1 + static_cast<int>(random() % 5));
      world->load(saved);
      model = saved_model;
      step = saved_step;
      ++num_killed;
    } else {
      const IdList all = world->save();
      world = std::make_unique<World>(1 + static_cast<int>(random() % 5));
      world->load(all);
      ++num_moved;
    }
    world->check(model, ids);
    if (HasFatalFailure()) return;
    if (since_check < check_every) continue;
    since_check = 0;
    world->check_all(model);
    if (HasFatalFailure()) return;
  }
  world->check_all(model);
  RecordProperty("killed", static_cast<int>(num_killed));
  RecordProperty("moved", static_cast<int>(num_moved));
  std::printf("%lld operations, %lld kills, %lld moves to other ranks, %zu ids at the end\n",
              static_cast<long long>(operations()), static_cast<long long>(num_killed),
              static_cast<long long>(num_moved), model.size());
}

}  // namespace
}  // namespace tessera::collision
