// Batches: every sample once, the same for any way to get there.

#include "dlrm/batch.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "dlrm/synthetic.h"

namespace tessera::workloads::dlrm {
namespace {

std::shared_ptr<const ClickLog> small_log(std::int64_t num_samples) {
  SyntheticOptions options;
  options.schema = {2, {{"one", 50, 1}, {"any", 20, 0}, {"three", 100, 3}}};
  options.num_samples = num_samples;
  return std::make_shared<SyntheticLog>(options);
}

std::string data_error(const std::function<void()>& function) {
  try {
    function();
  } catch (const DataError& error) {
    return error.what();
  }
  return "";
}

at::Tensor whole_dense(const ClickLog& log, std::int64_t first, std::int64_t count) {
  auto block = std::make_shared<SampleBlock>();
  log.read(first, count, *block);
  return make_batch(block, log.schema()).dense;
}

TEST(Batch, HoldsWhatTheBlockHolds) {
  const auto log = small_log(-1);
  auto block = std::make_shared<SampleBlock>();
  log->read(0, 6, *block);
  const ClickBatch batch = make_batch(block, log->schema());
  EXPECT_EQ(batch.size(), 6);
  EXPECT_EQ(batch.dense.sizes(), (std::vector<std::int64_t>{6, 2}));
  EXPECT_EQ(batch.sparse.keys(), (std::vector<std::string>{"one", "any", "three"}));
  EXPECT_EQ(batch.sparse.stride(), 6);
  EXPECT_EQ(batch.sparse.length_per_key()[2], 18);
  EXPECT_EQ(batch.sparse.values().data_ptr(), block->ids.data()) << "memory is shared";
  std::size_t at = 0;
  for (const std::size_t feature : {0U, 1U, 2U}) {
    const auto part = batch.sparse.feature(feature);
    for (std::int64_t i = 0; i < part.values().numel(); ++i) {
      EXPECT_EQ(part.values()[i].item<std::int64_t>(), block->ids[at++]);
    }
  }
  EXPECT_EQ(at, block->ids.size());
}

TEST(BatchSource, RanksShareTheSamplesOfAStep) {
  const auto log = small_log(100);
  for (const int world : {1, 2, 3}) {
    for (int rank = 0; rank < world; ++rank) {
      BatchSource source(log, {.batch_size = 7, .rank = rank, .world = world, .begin = 10});
      EXPECT_EQ(source.num_steps(), 90 / (7 * world));
      std::int64_t step = 0;
      while (const auto batch = source.next()) {
        EXPECT_TRUE(at::equal(batch->dense, whole_dense(*log, 10 + (step * world + rank) * 7, 7)));
        ++step;
      }
      EXPECT_EQ(step, source.num_steps());
      EXPECT_EQ(source.position(), step);
    }
  }
}

TEST(BatchSource, TheLastStepIsCutEvenly) {
  const auto log = small_log(10);
  std::vector<std::int64_t> sizes;
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < 3; ++rank) {
    BatchSource source(log, {.batch_size = 2, .rank = rank, .world = 3, .drop_last = false});
    ASSERT_EQ(source.num_steps(), 2);
    source.seek(1);
    const auto batch = source.next();
    sizes.push_back(batch->size());
    parts.push_back(batch->dense);
    EXPECT_FALSE(source.next());
  }
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{2, 1, 1}));
  EXPECT_TRUE(at::equal(at::cat(parts), whole_dense(*log, 6, 4)));
  // Fewer samples than ranks: the last ranks get batches of none.
  BatchSource last(small_log(1), {.batch_size = 2, .rank = 2, .world = 3, .drop_last = false});
  const auto none = last.next();
  EXPECT_EQ(none->size(), 0);
  EXPECT_EQ(none->sparse.stride(), 0);
  EXPECT_EQ(none->sparse.keys().size(), 3U);
}

TEST(BatchSource, ContinuesWhereItWasSaved) {
  const auto log = small_log(-1);
  BatchSource source(log, {.batch_size = 4});
  for (int i = 0; i < 5; ++i) (void)source.next();
  BatchSource other(log, {.batch_size = 4});
  other.seek(source.position());
  const auto a = source.next();
  const auto b = other.next();
  EXPECT_TRUE(at::equal(a->dense, b->dense));
  EXPECT_TRUE(at::equal(a->labels, b->labels));
  EXPECT_TRUE(jagged::kjt_is_equal(a->sparse, b->sparse));
}

/// Notes what is announced and what is read.
class NotedLog : public ClickLog {
 public:
  const ClickSchema& schema() const noexcept override { return schema_; }
  std::int64_t num_samples() const noexcept override { return 100; }
  void read(std::int64_t first, std::int64_t count, SampleBlock& block) const override {
    notes.push_back("read " + std::to_string(first) + " " + std::to_string(count));
    block.num_samples = count;
    block.labels.resize(static_cast<std::size_t>(count));
  }
  void expect(std::int64_t first, std::int64_t count) const override {
    notes.push_back("expect " + std::to_string(first) + " " + std::to_string(count));
  }
  mutable std::vector<std::string> notes;

 private:
  ClickSchema schema_{0, {}};
};

TEST(BatchSource, AnnouncesStepsOnceAndAheadOfReading) {
  using Notes = std::vector<std::string>;
  const auto log = std::make_shared<NotedLog>();
  BatchSource source(log, {.batch_size = 4, .rank = 1, .world = 2});  // 12 steps
  (void)source.next();
  ASSERT_EQ(log->notes.size(), 9U) << "the batch itself and eight steps";
  EXPECT_EQ(log->notes[0], "read 4 4");
  EXPECT_EQ(log->notes[1], "expect 12 4");
  EXPECT_EQ(log->notes[8], "expect 68 4");
  log->notes.clear();
  (void)source.next();
  EXPECT_EQ(log->notes, (Notes{"read 12 4", "expect 76 4"}));
  log->notes.clear();
  source.seek(2);  // where it is
  (void)source.next();
  EXPECT_EQ(log->notes, (Notes{"read 20 4", "expect 84 4"}));
  source.seek(10);
  log->notes.clear();
  (void)source.next();
  (void)source.next();
  EXPECT_EQ(log->notes, (Notes{"read 84 4", "expect 92 4", "read 92 4"}));
  source.seek(0);
  log->notes.clear();
  (void)source.next();
  EXPECT_EQ(log->notes.size(), 9U);
}

TEST(BatchSource, MemoryIsReusedOnlyWhenNobodyHoldsIt) {
  BatchSource source(small_log(-1), {.batch_size = 4});
  auto first = source.next();
  const at::Tensor kept = first->dense;
  const at::Tensor copy = kept.clone();
  first.reset();
  for (int i = 0; i < 3; ++i) (void)source.next();
  EXPECT_TRUE(at::equal(kept, copy));
}

TEST(BatchSource, RefusesWhatCannotBeRead) {
  const auto log = small_log(100);
  EXPECT_EQ(data_error([&] { BatchSource(log, {.rank = 2, .world = 2}); }),
            "batches: rank 2 of 2 with batches of 2048 samples makes no sense.");
  EXPECT_EQ(data_error([&] { BatchSource(log, {.batch_size = 10, .end = 101}); }),
            "batches: the part [0, 101) is not in the log, which holds 100 samples.");
  EXPECT_EQ(data_error([&] { BatchSource(log, {.batch_size = 60, .world = 2}); }),
            "batches: 100 samples make no step of 2 ranks x 60 samples; make the batch smaller.");
  BatchSource source(log, {.batch_size = 10});
  EXPECT_EQ(data_error([&] { source.seek(-1); }), "batches: there is no step -1.");
}

}  // namespace
}  // namespace tessera::workloads::dlrm
