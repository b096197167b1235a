// Growing tables saved by some ranks and loaded by others: they go on to the same bits.

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>

#include "checkpoint/quiet.h"
#include "collision/growing_world.h"
#include "support/ranks.h"
#include "support/sanitizers.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/growing_tables.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/modules.h"
#include "tessera/checkpoint/save.h"

namespace tessera::testing {
namespace {

using checkpoint::State;
using checkpoint::testing::quiet;
using checkpoint::testing::quiet_load;
using collision::AdmissionKind;
using collision::EvictionKind;

class Folder {
 public:
  Folder() {
    std::string path = (std::filesystem::temp_directory_path() / "growing-XXXXXX").string();
    path_ = mkdtemp(path.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::vector<GrowingTable> counted_tables() {
  auto tables = two_tables();
  tables[0].ids.admission = {.kind = AdmissionKind::kFrequency, .sightings = 2};
  tables[1].ids.capacity = 1;
  tables[1].ids.eviction.kind = EvictionKind::kDistanceLfu;
  tables[1].ids.refuse_when_full = true;
  return tables;
}

/// Trains steps [begin, end), after what was saved before `begin`, and saves.
void go_on(int world, std::int64_t begin, std::int64_t end, const std::string& root,
           const std::vector<GrowingTable>& tables,
           const std::map<std::string, sharding::Placement>& wishes, Remains* remains = nullptr) {
  run_ranks(world, [&](const comm::Group& group) {
    auto growing =
        std::make_shared<GrowingEmbeddingBagCollection>(tables, group, adagrad(), wishes);
    State state;
    checkpoint::add_module(state, growing, "tables.", "optimizer.");
    if (begin > 0) checkpoint::load(root, state, group, quiet_load());
    EXPECT_EQ(growing->num_calls(), begin);
    for (std::int64_t step = begin; step < end; ++step) train(*growing, step);
    checkpoint::save(root, end, state, group, quiet());
    if (remains != nullptr) add_remains(*growing, *remains);
  });
}

TEST(GrowingCheckpoint, EveryWorldGoesOnToTheSameBits) {
  for (const auto& tables : {two_tables(), counted_tables()}) {
    Remains straight;
    go_on(1, 0, 12, Folder().path(), tables, {}, &straight);
    const Folder folder;
    Remains cut;
    go_on(2, 0, 4, folder.path(), tables, {});
    go_on(3, 4, 8, folder.path(), tables, {{"b", sharding::table_wise(2)}});
    go_on(1, 8, 10, folder.path(), tables, {});
    go_on(4, 10, 12, folder.path(), tables, {}, &cut);
    EXPECT_EQ(straight, cut);
  }
}

TEST(GrowingCheckpoint, SaysHowTextsBecameIds) {
  const Folder folder;
  auto tables = two_tables();
  tables[0].text_hash = "xxh3-64";
  go_on(1, 0, 1, folder.path(), tables, {});
  const checkpoint::Values values = checkpoint::Reader(folder.path(), 1).manifest().values;
  EXPECT_EQ(values.at("tables.embedding_bags.a.str_hash"), checkpoint::Value("xxh3-64"));
  EXPECT_EQ(values.at("tables.embedding_bags.a.str_salt"), checkpoint::Value(std::int64_t{0}));
  EXPECT_FALSE(values.contains("tables.embedding_bags.b.str_hash"));
  EXPECT_FALSE(values.contains("tables.embedding_bags.b.str_salt"));
}

TEST(GrowingCheckpoint, TablesWithoutIdsAreSavedToo) {
  const Folder folder;
  go_on(2, 0, 0, folder.path(), counted_tables(), {});
  Remains straight;
  go_on(1, 0, 3, Folder().path(), counted_tables(), {}, &straight);
  run_ranks(3, [&](const comm::Group& group) {
    auto growing =
        std::make_shared<GrowingEmbeddingBagCollection>(counted_tables(), group, adagrad());
    train(*growing, 7);  // what a load must undo
    State state;
    checkpoint::add_module(state, growing, "tables.", "optimizer.");
    checkpoint::load(folder.path(), state, group, quiet_load());
    for (std::int64_t step = 0; step < 3; ++step) train(*growing, step);
    Remains own;
    add_remains(*growing, own);
    for (const auto& [table, ids] : own) {
      for (const auto& [id, left] : ids) EXPECT_EQ(left, straight.at(table).at(id)) << table << id;
    }
  });
}

// ---- deltas

std::vector<std::int64_t> numbers_in(const checkpoint::Reader& reader, const std::string& name) {
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(reader.find(name)->shape.at(0)));
  reader.read(name, {{0}, reader.find(name)->shape}, reinterpret_cast<std::byte*>(numbers.data()));
  return numbers;
}

/// Trains steps [begin, end) after what was saved before, and saves a delta after each of them but
/// a whole one after the first. The state dicts of one and many ranks are the same, so is this.
void go_on_by_deltas(int world, std::int64_t begin, std::int64_t end, const std::string& root,
                     const std::vector<GrowingTable>& tables,
                     const std::map<std::string, sharding::Placement>& wishes) {
  run_ranks(world, [&](const comm::Group& group) {
    auto growing =
        std::make_shared<GrowingEmbeddingBagCollection>(tables, group, adagrad(), wishes);
    const auto changes = growing->track_changes();
    State state;
    checkpoint::add_growing_tables(state, growing, "tables.", "optimizer.", changes);
    if (begin > 0) checkpoint::load(root, state, group, quiet_load());
    for (std::int64_t step = begin; step < end; ++step) {
      train(*growing, step);
      auto options = quiet();
      if (step > 0) options.base = step;
      checkpoint::save(root, step + 1, state, group, options);
      changes->forget();
    }
  });
}

TEST(GrowingDelta, AnyWorldLoadsAChainAndGoesOnToTheSameBits) {
  const auto tables = counted_tables();
  Remains straight;
  go_on(1, 0, 10, Folder().path(), tables, {}, &straight);
  const Folder folder;
  const std::string& root = folder.path();
  go_on_by_deltas(2, 0, 4, root, tables, {{"a", sharding::table_wise(1)}});
  go_on_by_deltas(3, 4, 8, root, tables, {{"b", sharding::table_wise(2)}});
  Remains chained;
  go_on(1, 8, 10, root, tables, {}, &chained);
  EXPECT_EQ(straight, chained);
  // The same once the chain is one checkpoint.
  checkpoint::compact(root, 8);
  EXPECT_FALSE(checkpoint::Reader(root, 8).manifest().base);
  std::filesystem::remove_all(root + "/" + checkpoint::folder_name(10));
  Remains compacted;
  go_on(4, 8, 10, root, tables, {}, &compacted);
  EXPECT_EQ(straight, compacted);
}

TEST(GrowingDelta, HoldsWhatChangedAndWhoIsGone) {
  // Table "b" has one row per bucket, so that ids push each other out.
  const Folder whole;
  const Folder delta;
  const std::string b = "tables.embedding_bags.b";
  auto tables = counted_tables();
  tables[1].ids.eviction.kind = EvictionKind::kLru;
  std::set<std::int64_t> evicted;
  run_ranks(2, [&](const comm::Group& group) {
    auto growing = std::make_shared<GrowingEmbeddingBagCollection>(tables, group, adagrad());
    const auto changes = growing->track_changes();
    State state;
    checkpoint::add_growing_tables(state, growing, "tables.", "optimizer.", changes);
    for (std::int64_t step = 0; step < 6; ++step) train(*growing, step);
    checkpoint::save(delta.path(), 6, state, group, quiet());
    changes->forget();
    const auto removals = growing->track_changes();
    for (std::int64_t step = 6; step < 16; ++step) train(*growing, step);
    auto options = quiet();
    options.base = 6;
    checkpoint::save(delta.path(), 16, state, group, options);
    checkpoint::save(whole.path(), 16, state, group, quiet());
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    for (const std::int64_t id : removals->take_removed_ids("b")) evicted.insert(id);
  });
  ASSERT_FALSE(evicted.empty());
  const checkpoint::Reader base(delta.path(), 6);
  const checkpoint::Reader chained(delta.path(), 16);
  const checkpoint::Reader full(whole.path(), 16);
  const auto& manifest = chained.manifest();
  ASSERT_EQ(manifest.lists.size(), 2U);
  EXPECT_EQ(manifest.lists[1].removed, b + ".removed");
  EXPECT_LT(manifest.find(b + ".ids@changed")->shape[0], full.find(b + ".ids")->shape[0]);
  EXPECT_EQ(static_cast<std::size_t>(manifest.find(b + ".removed")->shape[0]), evicted.size());
  // Readers see the lists whole, and none of what makes them up.
  ASSERT_EQ(chained.tensors().size(), full.tensors().size());
  for (std::size_t i = 0; i < full.tensors().size(); ++i) {
    EXPECT_EQ(chained.tensors()[i].name, full.tensors()[i].name);
    EXPECT_EQ(chained.tensors()[i].shape, full.tensors()[i].shape);
  }
  // The ids with their rows are those of a whole checkpoint, in each bucket in some order.
  const auto rows_of = [&](const checkpoint::Reader& reader) {
    std::map<std::int64_t, std::vector<float>> rows;
    const auto ids = numbers_in(reader, b + ".ids");
    std::vector<float> weight(ids.size() * 2);
    reader.read(b + ".weight", {{0, 0}, reader.find(b + ".weight")->shape},
                reinterpret_cast<std::byte*>(weight.data()));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      rows[ids[i]] = {weight[2 * i], weight[2 * i + 1]};
      // One at a time, and one column of it: what was read at once.
      float number = 0;
      reader.read(b + ".weight", {{static_cast<std::int64_t>(i), 1}, {1, 1}},
                  reinterpret_cast<std::byte*>(&number));
      EXPECT_EQ(number, weight[2 * i + 1]);
    }
    return rows;
  };
  EXPECT_EQ(rows_of(chained), rows_of(full));
  EXPECT_EQ(numbers_in(chained, b + ".bucket_rows"), numbers_in(full, b + ".bucket_rows"));
  const auto old_rows = rows_of(base);
  const auto new_rows = rows_of(full);
  bool has_lost = false;
  for (const std::int64_t id : evicted) has_lost |= old_rows.contains(id) && !new_rows.contains(id);
  EXPECT_TRUE(has_lost);
  chained.verify();
}

TEST(GrowingDelta, PublicationsHoldRowsAlone) {
  const Folder folder;
  run_ranks(2, [&](const comm::Group& group) {
    auto growing =
        std::make_shared<GrowingEmbeddingBagCollection>(counted_tables(), group, adagrad());
    State state;
    const auto changes = checkpoint::add_published_rows(state, growing, "tables.");
    for (std::int64_t step = 0; step < 4; ++step) {
      train(*growing, step);
      auto options = quiet();
      if (step > 0) options.base = step;
      checkpoint::save(folder.path(), step + 1, state, group, options);
      changes->forget();
    }
  });
  const checkpoint::Reader reader(folder.path(), 4);
  std::vector<std::string> names;
  for (const auto& tensor : reader.tensors()) names.push_back(tensor.name);
  const std::string group = "tables.embedding_bags.";
  EXPECT_EQ(names,
            (std::vector<std::string>{group + "a.bucket_rows", group + "a.ids", group + "a.unknown",
                                      group + "a.weight", group + "b.bucket_rows", group + "b.ids",
                                      group + "b.unknown", group + "b.weight"}));
  run_ranks(1, [&](const comm::Group& own) {
    auto growing =
        std::make_shared<GrowingEmbeddingBagCollection>(counted_tables(), own, adagrad());
    State state;
    checkpoint::add_published_rows(state, growing, "tables.");
    try {
      checkpoint::load(folder.path(), state, own, quiet_load());
      ADD_FAILURE() << "loaded";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("publications are for servers"), std::string::npos)
          << error.what();
    }
  });
}

/// Ids and rows of table "b" that a reader sees.
std::map<std::int64_t, std::vector<float>> rows_seen(const std::string& root, std::int64_t step) {
  const checkpoint::Reader reader(root, step);
  const std::string name = "tables.embedding_bags.b";
  const auto ids = numbers_in(reader, name + ".ids");
  std::vector<float> weight(ids.size() * 2);
  reader.read(name + ".weight", {{0, 0}, reader.find(name + ".weight")->shape},
              reinterpret_cast<std::byte*>(weight.data()));
  std::map<std::int64_t, std::vector<float>> rows;
  for (std::size_t i = 0; i < ids.size(); ++i) rows[ids[i]] = {weight[2 * i], weight[2 * i + 1]};
  EXPECT_EQ(rows.size(), ids.size());
  return rows;
}

TEST(GrowingDelta, CheckpointsAndPublicationsHaveBasesOfTheirOwn) {
  // Deltas every second and every third step, with evictions between: neither loses what the other
  // has forgotten.
  const Folder whole;
  const Folder saved;
  const Folder published;
  auto tables = counted_tables();
  tables[1].ids.eviction.kind = EvictionKind::kLru;
  run_ranks(2, [&](const comm::Group& group) {
    auto growing = std::make_shared<GrowingEmbeddingBagCollection>(tables, group, adagrad());
    const auto changes = growing->track_changes();
    State state;
    checkpoint::add_growing_tables(state, growing, "tables.", "optimizer.", changes);
    State for_servers;
    const auto served = checkpoint::add_published_rows(for_servers, growing, "tables.");
    const auto save = [&](const Folder& folder, State& what, std::int64_t step, std::int64_t every,
                          collision::GrowingChanges& follower) {
      auto options = quiet();
      if (step > every) options.base = step - every;
      checkpoint::save(folder.path(), step, what, group, options);
      follower.forget();
    };
    for (std::int64_t step = 1; step <= 12; ++step) {
      train(*growing, step);
      if (step % 2 == 0) save(saved, state, step, 2, *changes);
      if (step % 3 == 0) save(published, for_servers, step, 3, *served);
    }
    State all;
    checkpoint::add_growing_tables(all, growing, "tables.", "optimizer.");
    checkpoint::save(whole.path(), 12, all, group, quiet());
  });
  const auto rows = rows_seen(whole.path(), 12);
  EXPECT_FALSE(rows.empty());
  EXPECT_EQ(rows_seen(saved.path(), 12), rows);
  EXPECT_EQ(rows_seen(published.path(), 12), rows);
}

/// A checkpoint of one table "a" with these ids in these buckets, as a program of another kind
/// wrote it.
void write_foreign(const std::string& root, const std::vector<std::int64_t>& ids,
                   std::vector<std::int64_t> bucket_rows, const std::string& hash,
                   std::int64_t seed = 11, const std::string& text_hash = "xxh3-64",
                   std::int64_t text_salt = 0) {
  State state;
  const auto count = static_cast<std::int64_t>(ids.size());
  const std::string name = "tables.embedding_bags.a";
  state.add_replicated(name + ".ids", at::tensor(ids, at::kLong));
  state.add_replicated(name + ".counts", at::ones({count}, at::kLong));
  state.add_replicated(name + ".last_step", at::ones({count}, at::kLong));
  state.add_replicated(name + ".weight", at::ones({count, 3}));
  state.add_replicated(name + ".unknown", at::zeros({1, 3}));
  state.add_replicated(name + ".bucket_rows", at::tensor(bucket_rows, at::kLong));
  state.add_replicated("optimizer.embedding_bags.a.weight.momentum1", at::zeros({count}));
  state.add_replicated("optimizer.embedding_bags.a.weight.unknown.momentum1", at::zeros({1}));
  state.values["tables.embedding_bags.id_hash"] = hash;
  state.values["tables.embedding_bags.calls"] = std::int64_t{1};
  state.values[name + ".seed"] = seed;
  state.values[name + ".str_hash"] = text_hash;
  state.values[name + ".str_salt"] = text_salt;
  checkpoint::save(root, 1, state, std::nullopt, quiet());
}

std::string load_error(const std::string& root) {
  const auto errors = run_ranks_collecting(2, [&](const comm::Group& group) {
    std::vector<GrowingTable> tables{two_tables()[0]};
    tables[0].text_hash = "xxh3-64";
    auto growing = std::make_shared<GrowingEmbeddingBagCollection>(tables, group, adagrad());
    const auto count = group.rank() == 0 ? 1 : 0;
    jagged::KeyedJaggedFields fields;
    fields.lengths = at::full({count}, 2, at::kInt);
    fields.stride = count;
    const jagged::KeyedJaggedTensor features({"f"}, at::arange(4, 4 + 2 * count, at::kLong),
                                             fields);
    growing->forward(features).values().sum().backward();
    Remains before;
    add_remains(*growing, before);
    State state;
    checkpoint::add_growing_tables(state, growing, "tables.", "optimizer.");
    try {
      checkpoint::load(root, state, group, quiet_load());
    } catch (...) {
      Remains after;
      add_remains(*growing, after);
      EXPECT_EQ(before, after);
      throw;
    }
  });
  EXPECT_EQ(text_of(errors[0]), text_of(errors[1]));
  return text_of(errors[0]);
}

TEST(GrowingCheckpoint, WhatNoTableWroteIsRefused) {
  const auto rows_of = [](const std::vector<std::int64_t>& ids) {
    std::vector<std::int64_t> rows(1024);
    for (const std::int64_t id : ids) ++rows[static_cast<std::size_t>(collision::bucket_of(id))];
    return rows;
  };
  const auto expect = [](const std::string& text, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  {
    const Folder folder;
    write_foreign(folder.path(), {7}, rows_of({7}), "murmur-3");
    expect(load_error(folder.path()), {"'murmur-3'", "'xmx64-1'"});
  }
  {
    const Folder folder;
    write_foreign(folder.path(), {7}, rows_of({7}), "xmx64-1", 11, "cityhash-64");
    expect(load_error(folder.path()), {"embedding_bags.a", "'cityhash-64'", "'xxh3-64'"});
  }
  {
    const Folder folder;
    write_foreign(folder.path(), {7}, rows_of({7}), "xmx64-1", 11, "xxh3-64", 5);
    expect(load_error(folder.path()), {"embedding_bags.a", "with salt 5", "here without one"});
  }
  {
    const Folder folder;
    write_foreign(folder.path(), {7}, rows_of({7}), "xmx64-1", 99);
    expect(load_error(folder.path()), {"seed 99", "11"});
  }
  {
    const Folder folder;
    write_foreign(folder.path(), {7, 7}, rows_of({7, 7}), "xmx64-1");
    expect(load_error(folder.path()), {"embedding_bags.a", "rows 0 and 1 both have id 7"});
  }
  {
    const Folder folder;
    auto rows = rows_of({7});
    rows[static_cast<std::size_t>(collision::bucket_of(7))] = 0;
    rows[static_cast<std::size_t>((collision::bucket_of(7) + 1) % 1024)] = 1;
    write_foreign(folder.path(), {7}, rows, "xmx64-1");
    expect(load_error(folder.path()),
           {"id 7 in row 0", "the id is of bucket " + std::to_string(collision::bucket_of(7))});
  }
  {
    const Folder folder;
    auto rows = rows_of({7});
    rows[5] += 1;
    write_foreign(folder.path(), {7}, rows, "xmx64-1");
    expect(load_error(folder.path()), {"its buckets overlap, or leave some out"});
  }
}

/// Memory that this process writes to, in bytes.
rlim_t data_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "VmData:") continue;
    rlim_t kilobytes = 0;
    status >> kilobytes;
    return kilobytes << 10;
  }
  return 0;
}

/// So much more memory until the end of the block.
class MemoryLeft {
 public:
  explicit MemoryLeft(rlim_t bytes) {
    getrlimit(RLIMIT_DATA, &before_);
    rlimit less = before_;
    less.rlim_cur = data_bytes() + bytes;
    setrlimit(RLIMIT_DATA, &less);
  }
  ~MemoryLeft() { setrlimit(RLIMIT_DATA, &before_); }

 private:
  rlimit before_{};
};

// Whether there is memory for the rows of every table is known before the first one changes.
TEST(GrowingCheckpoint, WithoutMemoryForOneTableNoneChanges) {
  if (kIsSanitized) GTEST_SKIP() << "sanitizers have memory of their own";
  constexpr std::int64_t kRows = 1000;
  constexpr std::int64_t kColumns = 32768;
  constexpr rlim_t kBytes = kRows * kColumns * sizeof(float);
  auto tables = two_tables();
  tables[1].config.embedding_dim = kColumns;
  const auto features = [](std::int64_t first, std::int64_t num_b) {
    jagged::KeyedJaggedFields fields;
    fields.lengths = at::tensor({std::int64_t{3}, num_b, std::int64_t{0}}, at::kInt);
    fields.stride = 1;
    return jagged::KeyedJaggedTensor(
        {"f", "g", "h"}, at::cat({at::arange(first, first + 3), at::arange(num_b)}), fields);
  };
  const Folder folder;
  run_ranks(1, [&](const comm::Group& group) {
    {
      auto saved = std::make_shared<GrowingEmbeddingBagCollection>(tables, group, adagrad());
      saved->forward(features(4, kRows));
      State state;
      checkpoint::add_module(state, saved, "tables.", "optimizer.");
      checkpoint::save(folder.path(), 1, state, group, quiet());
    }
    auto growing = std::make_shared<GrowingEmbeddingBagCollection>(tables, group, adagrad());
    growing->forward(features(90, 0)).values().sum().backward();
    growing->forward(features(91, 0)).values().sum().backward();
    State state;
    checkpoint::add_module(state, growing, "tables.", "optimizer.");
    Remains before;
    add_remains(*growing, before);
    auto options = quiet_load();
    options.staging_bytes = 0;  // tensors are read where they go
    std::string text;
    {
      // For what is read and the blocks it is read by, but not for the rows themselves.
      const MemoryLeft left(kBytes + (rlim_t{110} << 20));
      try {
        checkpoint::load(folder.path(), state, group, options);
      } catch (const std::exception& error) {
        text = error.what();
      }
    }
    EXPECT_NE(text.find("no memory for 1000 rows of table 'b'; nothing has changed. Load on more "
                        "ranks."),
              std::string::npos)
        << text;
    Remains after;
    add_remains(*growing, after);
    EXPECT_EQ(before, after);
    EXPECT_EQ(growing->num_calls(), 2);
    checkpoint::load(folder.path(), state, group, options);
    EXPECT_EQ(growing->export_ids("a").ids.size(), 3U);
    EXPECT_EQ(static_cast<std::int64_t>(growing->export_ids("b").ids.size()), kRows);
    EXPECT_EQ(growing->num_calls(), 1);
  });
}

}  // namespace
}  // namespace tessera::testing
