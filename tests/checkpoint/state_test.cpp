// States of jobs: tensors and sharded tables; saved by some ranks, loaded by others.

#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "checkpoint/quiet.h"
#include "checkpoint/samples.h"
#include "support/ranks.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"

namespace tessera::checkpoint::testing {
namespace {

using tessera::testing::run_ranks;
using tessera::testing::run_ranks_collecting;
using tessera::testing::text_of;

// How a table of [kRows, kColumns] lies on the ranks of a group.
constexpr std::int64_t kRows = 11;
constexpr std::int64_t kColumns = 6;

enum class Layout { kReplicated, kOnLast, kRows, kColumns, kGrid, kUneven };
constexpr Layout kLayouts[] = {Layout::kReplicated, Layout::kOnLast, Layout::kRows,
                               Layout::kColumns,    Layout::kGrid,   Layout::kUneven};

std::vector<Region> regions_of(Layout layout, int rank, int size) {
  const auto cut = [](std::int64_t extent, int part, int parts) {
    return std::pair(extent * part / parts, extent * (part + 1) / parts);
  };
  switch (layout) {
    case Layout::kReplicated:
      return {{{0, 0}, {kRows, kColumns}}};
    case Layout::kOnLast:
      if (rank != size - 1) return {};
      return {{{0, 0}, {kRows, kColumns}}};
    case Layout::kRows: {
      const auto [begin, end] = cut(kRows, rank, size);
      return {{{begin, 0}, {end - begin, kColumns}}};
    }
    case Layout::kColumns: {
      const auto [begin, end] = cut(kColumns, rank, size);
      return {{{0, begin}, {kRows, end - begin}}};
    }
    case Layout::kGrid: {  // twice as many boxes as ranks: two pieces each
      std::vector<Region> regions;
      const auto [begin, end] = cut(kRows, rank, size);
      for (const auto& [left, right] : {std::pair(0L, 2L), std::pair(2L, kColumns)}) {
        regions.push_back({{begin, left}, {end - begin, right - left}});
      }
      return regions;
    }
    case Layout::kUneven: {  // all but one row on rank 0, nothing on ranks above 1
      if (size == 1) return {{{0, 0}, {kRows, kColumns}}};
      if (rank == 0) return {{{0, 0}, {kRows - 1, kColumns}}};
      if (rank == 1) return {{{kRows - 1, 0}, {1, kColumns}}};
      return {};
    }
  }
  return {};
}

at::Tensor whole_table(int salt) {
  at::Tensor table = at::arange(kRows * kColumns, at::kFloat).reshape({kRows, kColumns}) + salt;
  table[3][2] = std::numeric_limits<float>::quiet_NaN();
  table[4][5] = -0.0F;
  return table;
}

at::Tensor box_of(const at::Tensor& whole, const Region& region) {
  at::Tensor box = whole;
  for (std::size_t i = 0; i < region.offsets.size(); ++i) {
    box = box.narrow(static_cast<std::int64_t>(i), region.offsets[i], region.lengths[i]);
  }
  return box;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.contiguous().view(-1).view(at::kByte),
                   b.contiguous().view(-1).view(at::kByte));
}

// A table, its momentum of the same layout, and its row-wise state, which has no columns.
struct TableState {
  State state;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // this rank's, and what it should be

  TableState(Layout layout, int rank, int size, bool is_filled) {
    for (const char* name : {"table", "table.momentum"}) {
      const at::Tensor whole = whole_table(name[5] == '\0' ? 0 : 1000);
      PlacedTensor placed;
      placed.name = name;
      placed.shape = {kRows, kColumns};
      placed.is_replicated = layout == Layout::kReplicated;
      for (const Region& region : regions_of(layout, rank, size)) {
        const at::Tensor expected = box_of(whole, region);
        // Not contiguous, to make it harder.
        const at::Tensor room = at::full({region.lengths[1], region.lengths[0]}, 7.F).t();
        if (is_filled) room.copy_(expected);
        pairs.emplace_back(room, expected);
        placed.pieces.push_back({region.offsets, room, {}});
      }
      state.add(std::move(placed));
    }
    // One number per row; in column layouts every rank has all rows, and one of them speaks.
    const at::Tensor sums = at::arange(kRows, at::kDouble) / 3;
    PlacedTensor placed;
    placed.name = "table.sum";
    placed.shape = {kRows};
    placed.is_replicated = layout == Layout::kReplicated || layout == Layout::kColumns;
    if (placed.is_replicated) {
      placed.pieces.push_back(
          {{0}, is_filled ? sums.clone() : at::zeros({kRows}, at::kDouble), {}});
      pairs.emplace_back(placed.pieces[0].tensor, sums);
    } else {
      for (const Region& region : regions_of(layout, rank, size)) {
        if (region.offsets[1] != 0) continue;
        const at::Tensor expected = sums.narrow(0, region.offsets[0], region.lengths[0]);
        const at::Tensor room = is_filled ? expected.clone() : at::zeros_like(expected);
        pairs.emplace_back(room, expected);
        placed.pieces.push_back({{region.offsets[0]}, room, {}});
      }
    }
    state.add(std::move(placed));
  }

  void expect_loaded() const {
    for (const auto& [got, expected] : pairs) EXPECT_TRUE(same_bits(got, expected));
  }
};

TEST(Reshard, AnyWorldAndLayoutIntoAnyOther) {
  for (const int saved : {1, 2, 3, 4}) {
    for (const Layout layout : kLayouts) {
      const TemporaryFolder root;
      run_ranks(saved, [&](const comm::Group& group) {
        TableState table(layout, group.rank(), group.size(), true);
        table.state.rank_values["position"] = std::int64_t{100 + group.rank()};
        save(root.path(), 1, table.state, group, quiet());
      });
      for (const int loaded : {1, 2, 3, 4}) {
        run_ranks(loaded, [&](const comm::Group& group) {
          for (const Layout other : kLayouts) {
            TableState table(other, group.rank(), group.size(), false);
            const LoadReport report = load(root.path(), table.state, group, quiet_load());
            table.expect_loaded();
            EXPECT_EQ(report.saved_world, saved);
            if (group.rank() < saved) {
              EXPECT_EQ(std::get<std::int64_t>(report.rank_values.at("position")),
                        100 + group.rank());
            } else {
              EXPECT_TRUE(report.rank_values.empty());
            }
          }
        });
      }
    }
  }
}

TEST(Ranks, DataParallelStateIsWrittenOnceAndSpread) {
  const TemporaryFolder root;
  run_ranks(3, [&](const comm::Group& group) {
    State state;
    for (int i = 0; i < 7; ++i) {
      state.add_replicated(std::string("t").append(std::to_string(i)),
                           at::full({100 * (i + 1)}, i, at::kFloat));
    }
    state.add_replicated("pinned", at::ones({3}), 2);
    const SaveReport report = save(root.path(), 1, state, group, quiet());
    EXPECT_GT(report.rank_bytes, 2500U);
    EXPECT_LT(report.rank_bytes, 5500U);
    EXPECT_GT(report.total_bytes, 11200U);
  });
  const Reader reader(root.path(), 1);
  EXPECT_EQ(reader.manifest().find("pinned")->regions[0].file, 2);
  for (int i = 0; i < 7; ++i) {
    const TensorInfo* info = reader.find(std::string("t").append(std::to_string(i)));
    EXPECT_TRUE(at::equal(read_tensor(reader, *info), at::full({100 * (i + 1)}, i, at::kFloat)));
  }
}

TEST(Ranks, AllLoadTheSameNewestThatIsWhole) {
  const TemporaryFolder root;
  const auto save_step = [&](std::int64_t step) {
    run_ranks(2, [&](const comm::Group& group) {
      State state;
      state.add_shard("t", {4}, {2 * group.rank()},
                      at::full({2}, 10 * step + group.rank(), at::kFloat));
      save(root.path(), step, state, group, quiet());
    });
  };
  for (const int step : {1, 2, 3, 4}) save_step(step);
  // Step 4: damaged where only rank 1 reads. Step 3: its manifest is gone.
  const std::string shard = root / "step-000000000004/shard-00002-model-00001-of-00001.safetensors";
  std::string bytes = slurp(shard);
  bytes.back() ^= 1;
  spill(shard, bytes);
  std::filesystem::remove(root / "step-000000000003/MANIFEST.json");
  std::atomic<int> num_lines = 0;
  run_ranks(2, [&](const comm::Group& group) {
    State state;
    const at::Tensor mine = at::zeros({2});
    state.add_shard("t", {4}, {2 * group.rank()}, mine);
    LoadOptions options;
    options.log = [&](const std::string& line) {
      ++num_lines;
      EXPECT_TRUE(line.starts_with("checkpoint.load: step 2 is loaded instead of a newer one: "));
    };
    const LoadReport report = load(root.path(), state, group, options);
    EXPECT_EQ(report.step, 2);
    EXPECT_TRUE(at::equal(mine, at::full({2}, 20 + group.rank(), at::kFloat)));
    ASSERT_EQ(report.warnings.size(), 2U);
    EXPECT_EQ(report.warnings[0], root / "step-000000000003/MANIFEST.json: is missing.");
    EXPECT_TRUE(report.warnings[1].starts_with(shard + ": tensor 't' was changed between bytes "));

    // A step that is asked for is not replaced by another.
    options.step = 4;
    try {
      load(root.path(), state, group, options);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kCorrupt);
      EXPECT_TRUE(std::string(error.what()).starts_with("checkpoint.load: rank 1: " + shard));
    }
  });
  EXPECT_EQ(num_lines, 2);
}

TEST(Ranks, ErrorsOfOneRankReachAllAndTheGroupGoesOn) {
  const TemporaryFolder root;
  struct FullDisk final : Disk {
    ssize_t write(int, const void*, std::size_t) override {
      errno = ENOSPC;
      return -1;
    }
  } full;
  run_ranks(3, [&](const comm::Group& group) {
    const auto problem = [&](State& state, SaveOptions options) {
      try {
        save(root.path(), 7, state, group, options);
      } catch (const Error& error) {
        return std::string(error.what());
      }
      return std::string();
    };
    State good;
    good.add_shard("t", {3}, {group.rank()}, at::full({1}, group.rank(), at::kFloat));
    SaveOptions options = quiet();
    if (group.rank() == 1) options.disk = &full;
    const std::string text = problem(good, options);
    EXPECT_TRUE(
        text.starts_with("checkpoint.save: rank 1: checkpoint: cannot write " + root.path()))
        << text;
    EXPECT_NE(text.find("shard-00002-model-00001-of-00001.safetensors: No space left on device."),
              std::string::npos);

    State outside;
    outside.add_shard("t", {3}, {group.rank() + (group.rank() == 2 ? 1 : 0)}, at::zeros({1}));
    EXPECT_EQ(
        problem(outside, quiet()),
        "checkpoint.save: rank 2: checkpoint: a piece of 't' at [3] of [1] leaves its shape [3].");

    State overlapping;
    overlapping.add_shard("t", {3}, {std::min(group.rank(), 1)}, at::zeros({1}));
    EXPECT_EQ(problem(overlapping, quiet()),
              "checkpoint.save: rank 0: checkpoint.save, tensor 't': has regions that overlap.");

    State shapes;
    shapes.add_shard("t", {3 + group.rank()}, {group.rank()}, at::zeros({1}));
    EXPECT_EQ(problem(shapes, quiet()),
              "checkpoint.save: rank 0: checkpoint.save: tensor 't' is F32 [3] on one rank and F32 "
              "[4] on another.");

    State values;
    values.values["step"] = std::int64_t{group.rank() / 2};
    EXPECT_EQ(problem(values, quiet()),
              "checkpoint.save: rank 0: checkpoint.save: the value 'step' of rank 2 is not that of "
              "an earlier rank. Put it into rank_values.");

    State missing_base = good;
    SaveOptions delta = quiet();
    delta.base = 3;
    EXPECT_EQ(problem(missing_base, delta), "checkpoint.save: rank 0: " + root.path() +
                                                "/step-000000000003: No such file or directory.");
    EXPECT_TRUE(list_steps(root.path()).empty());
    EXPECT_EQ(problem(good, quiet()), "");  // and the group still works
  });
  EXPECT_EQ(list_steps(root.path()), std::vector<std::int64_t>{7});
}

TEST(Load, WhatDoesNotFitIsNamed) {
  const TemporaryFolder root;
  const auto problem = [&](State state) {
    return error_of([&] { load(root.path(), state, std::nullopt, quiet_load()); });
  };
  EXPECT_EQ(problem({}), "checkpoint.load: there is no whole checkpoint in " + root.path() + ".");
  State saved;
  saved.add_replicated("w", at::ones({2, 3}));
  save(root.path(), 1, saved, std::nullopt, quiet());
  const std::string folder = root / "step-000000000001";
  State other;
  other.add_replicated("v", at::ones({2, 3}));
  EXPECT_EQ(problem(other), folder + ": there is no tensor 'v'.");
  State shape;
  shape.add_replicated("w", at::ones({3, 2}));
  EXPECT_EQ(problem(shape), folder + ": tensor 'w' is F32 [2, 3], the state wants [3, 2].");
  State type;
  type.add_replicated("w", at::ones({2, 3}, at::kDouble));
  EXPECT_EQ(problem(type), folder + ": tensor 'w' is F32 [2, 3], the state wants F64.");
  State place;
  place.add_shard("w", {2, 3}, {1, 0}, at::ones({2, 3}));
  EXPECT_EQ(problem(place),
            folder + ": tensor 'w' is F32 [2, 3], the state wants a piece at [1, 0] of [2, 3].");
  EXPECT_EQ(problem({}), "");
}

// Damage that shows only when the data is read: tensor 'b' of the newest.
void damage_last_byte(const std::string& path) {
  std::string bytes = slurp(path);
  bytes.back() ^= 1;
  spill(path, bytes);
}

TEST(Load, AllOrNothing) {
  const TemporaryFolder root;
  run_ranks(2, [&](const comm::Group& group) {
    State state;
    state.add_shard("a", {4, 3}, {2 * group.rank(), 0}, at::ones({2, 3}));
    state.add_shard("b", {4, 3}, {2 * group.rank(), 0}, at::ones({2, 3}));
    save(root.path(), 1, state, group, quiet());
  });
  // Only rank 1 reads what is damaged.
  damage_last_byte(root / "step-000000000001/shard-00002-model-00001-of-00001.safetensors");
  for (const std::int64_t staging_bytes : {std::int64_t{0}, std::int64_t{1} << 20}) {
    run_ranks(2, [&](const comm::Group& group) {
      const at::Tensor a = at::full({2, 3}, 7.F);
      const at::Tensor b = at::full({3, 2}, 7.F).t();
      State state;
      state.add_shard("a", {4, 3}, {2 * group.rank(), 0}, a);
      state.add_shard("b", {4, 3}, {2 * group.rank(), 0}, b);
      LoadOptions options = quiet_load();
      options.staging_bytes = staging_bytes;
      for (const bool by_step : {false, true}) {
        if (by_step) options.step = 1;
        const std::string text = error_of([&] { load(root.path(), state, group, options); });
        EXPECT_NE(text.find("tensor 'b' was changed"), std::string::npos) << text;
        EXPECT_TRUE(at::equal(a, at::full({2, 3}, 7.F)));
        EXPECT_TRUE(at::equal(b, at::full({2, 3}, 7.F)));
      }
    });
  }
}

TEST(Load, WithoutStagingTheSameIsLoaded) {
  const TemporaryFolder root;
  const at::Tensor whole = at::arange(24, at::kFloat).reshape({4, 6});
  State saved;
  saved.add_replicated("t", whole);
  saved.add_replicated("n", at::full({}, 3, at::kLong));
  save(root.path(), 1, saved, std::nullopt, quiet());
  for (const std::int64_t staging_bytes : {0, 1 << 20}) {
    const at::Tensor across = at::zeros({6, 4}).t();
    const at::Tensor number = at::zeros({}, at::kLong);
    State state;
    state.add_replicated("t", across);
    state.add_replicated("n", number);
    LoadOptions options = quiet_load();
    options.staging_bytes = staging_bytes;
    load(root.path(), state, std::nullopt, options);
    EXPECT_TRUE(at::equal(across, whole));
    EXPECT_EQ(number.item<std::int64_t>(), 3);
  }
}

// A disk that does not answer is no reason to go back to an older step.
TEST(Ranks, WhatOneCannotReadForNowIsLoadedByNone) {
  struct BadDisk final : Disk {
    ssize_t read(int, void*, std::size_t, std::uint64_t) override {
      errno = EIO;
      return -1;
    }
    void pause(int) override {}
  } bad;
  const TemporaryFolder root;
  run_ranks(2, [&](const comm::Group& group) {
    State state;
    const at::Tensor mine = at::full({2}, group.rank(), at::kFloat);
    state.add_shard("t", {4}, {2 * group.rank()}, mine);
    for (const int step : {1, 2}) save(root.path(), step, state, group, quiet());
    mine.fill_(9);
    LoadOptions options = quiet_load();
    if (group.rank() == 1) options.disk = &bad;
    try {
      load(root.path(), state, group, options);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kRead);
      EXPECT_TRUE(std::string(error.what()).starts_with("checkpoint.load: rank 1: " + root.path()))
          << error.what();
    }
    EXPECT_TRUE(at::equal(mine, at::full({2}, 9.F)));
    options.disk = nullptr;
    EXPECT_EQ(load(root.path(), state, group, options).step, 2);
  });
}

TEST(Save, WrongStatesAreNamed) {
  const TemporaryFolder root;
  const auto problem = [&](const State& state) {
    try {
      save(root.path(), 1, state, std::nullopt, quiet());
    } catch (const c10::Error& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string();
  };
  State twice;
  twice.add_replicated("w", at::ones({2}));
  twice.add_replicated("w", at::ones({2}));
  EXPECT_EQ(problem(twice), "checkpoint: 'w' is there twice.");
  State type;
  type.add_replicated("w", at::ones({2}, at::kComplexDouble));
  EXPECT_EQ(problem(type),
            "checkpoint: elements of type ComplexDouble cannot be stored. Convert the "
            "tensor first.");
  State part;
  PlacedTensor placed;
  placed.name = "w";
  placed.shape = {4};
  placed.is_replicated = true;
  placed.pieces = {{{0}, at::ones({2}), {}}};
  part.add(placed);
  EXPECT_EQ(problem(part),
            "checkpoint: 'w' is called replicated, but this rank does not hold all of it.");
  State owner;
  owner.add_replicated("w", at::ones({2}), 5);
  EXPECT_EQ(problem(owner), "checkpoint: 'w' belongs to rank 5 of 1.");
  State none;
  none.add(PlacedTensor{"w", {1}, {{{0}, at::Tensor(), {}}}});
  EXPECT_EQ(problem(none), "checkpoint: a piece of 'w' has no tensor.");
  EXPECT_TRUE(list_steps(root.path()).empty());
}

TEST(Save, EveryTypeAndOddShapesComeBack) {
  const TemporaryFolder root;
  State saved;
  State loaded;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  int number = 0;
  const auto add = [&](const at::Tensor& tensor) {
    const std::string name = std::string("t").append(std::to_string(number++));
    saved.add_replicated(name, tensor);
    pairs.emplace_back(tensor, at::zeros(tensor.sizes(), tensor.options()));
    loaded.add_replicated(name, pairs.back().second);
  };
  for (const auto type : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong,
                          at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat}) {
    add(at::arange(7, at::kFloat).to(type));
  }
  add(at::arange(5).to(at::kFloat).to(at::kFloat8_e4m3fn));
  add(at::ones({}, at::kDouble));
  add(at::ones({0, 4}));
  add(at::arange(24, at::kFloat).reshape({2, 3, 4}).transpose(0, 2));
  save(root.path(), 1, saved, std::nullopt, quiet());
  load(root.path(), loaded, std::nullopt, quiet_load());
  for (const auto& [expected, got] : pairs) {
    EXPECT_TRUE(same_bits(got, expected)) << expected.scalar_type();
  }
}

TEST(Delta, TouchedRowsOverRanksAndAnotherLayout) {
  const TemporaryFolder root;
  at::Tensor whole = at::arange(40, at::kFloat).reshape({10, 4});
  at::Tensor momentum = at::zeros({10});
  const auto state_of = [&](const comm::Group& group, const at::Tensor& touched) {
    // Columns 0-1 on rank 0, 2-3 on rank 1; row-wise momentum on rank 0.
    State state;
    PlacedTensor table{"table", {10, 4}, {}};
    table.pieces = {{{0, 2 * group.rank()}, whole.narrow(1, 2 * group.rank(), 2), touched}};
    state.add(table);
    PlacedTensor sums{"sums", {10}, {}};
    if (group.rank() == 0) sums.pieces = {{{0}, momentum, touched}};
    state.add(sums);
    state.add_replicated("dense", at::full({2}, whole[0][0].item<float>()));
    return state;
  };
  const auto save_step = [&](std::int64_t step, const at::Tensor& touched,
                             std::optional<std::int64_t> base) {
    run_ranks(2, [&](const comm::Group& group) {
      SaveOptions options = quiet();
      options.base = base;
      save(root.path(), step, state_of(group, touched), group, options);
    });
  };
  TouchedRows touched(10);
  save_step(1, {}, std::nullopt);
  touched.mark(at::tensor(std::vector<std::int64_t>{7, 2, 7}, at::kLong));
  whole.index_fill_(0, touched.rows(), -1);
  momentum.index_fill_(0, touched.rows(), 5);
  save_step(2, touched.rows(), 1);
  touched.clear();
  EXPECT_EQ(touched.rows().size(0), 0);
  save_step(3, touched.rows(), 2);  // nothing changed
  touched.mark(at::tensor(std::vector<std::int32_t>{0, 2}, at::kInt));
  whole.index_fill_(0, touched.rows(), -2);
  save_step(4, touched.rows(), 3);

  for (const bool is_compact : {false, true}) {
    run_ranks(3, [&](const comm::Group& group) {  // by rows, over another number of ranks
      const std::int64_t begin = 10 * group.rank() / 3;
      const std::int64_t count = 10 * (group.rank() + 1) / 3 - begin;
      State state;
      const at::Tensor rows = at::zeros({count, 4});
      const at::Tensor sums = at::zeros({count});
      const at::Tensor dense = at::zeros({2});
      state.add_shard("table", {10, 4}, {begin, 0}, rows);
      state.add_shard("sums", {10}, {begin}, sums);
      state.add_replicated("dense", dense);
      EXPECT_EQ(load(root.path(), state, group, quiet_load()).step, 4);
      EXPECT_TRUE(at::equal(rows, whole.narrow(0, begin, count)));
      EXPECT_TRUE(at::equal(sums, momentum.narrow(0, begin, count)));
      EXPECT_TRUE(at::equal(dense, at::full({2}, -2.F)));
    });
    if (!is_compact) compact(root.path(), 4);
  }
  const Reader reader(root.path(), 2);
  EXPECT_EQ(reader.manifest().find("table@values.0.0")->shape, (std::vector<std::int64_t>{2, 2}));
}

}  // namespace
}  // namespace tessera::checkpoint::testing
