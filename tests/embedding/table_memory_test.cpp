// What a batch of tables takes: the tables, the state of their optimizer, and next to nothing else;
// and nothing new in the steady state.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include "tessera/embedding/table_batch.h"

namespace {

// Large pieces only: graphs and shapes take some small ones in every step.
constexpr std::size_t kLarge = 16 << 10;
std::atomic<std::int64_t> num_large{0};

void note(std::size_t bytes) {
  if (bytes >= kLarge) num_large.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

// Work buffers come from here.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  note(bytes);
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  note(bytes);
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace tessera::embedding {
namespace {

/// Counts the bytes of tensors; in force while it lives.
class Counting final : public c10::Allocator {
 public:
  Counting() : inner_(c10::GetCPUAllocator()) {
    instance = this;
    c10::SetCPUAllocator(this, /*priority=*/100);
  }
  ~Counting() override {
    c10::SetCPUAllocator(inner_, /*priority=*/100);
    instance = nullptr;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    note(bytes);
    live_ += static_cast<std::int64_t>(bytes);
    auto* held = new Held{inner_->allocate(bytes), bytes};
    return {held->memory.get(), held, &release, at::Device(at::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  std::int64_t live() const { return live_; }

 private:
  struct Held {
    c10::DataPtr memory;
    std::size_t bytes;
  };
  static void release(void* context) {
    auto* held = static_cast<Held*>(context);
    if (instance != nullptr) instance->live_ -= static_cast<std::int64_t>(held->bytes);
    delete held;
  }

  static Counting* instance;
  c10::Allocator* inner_;
  std::atomic<std::int64_t> live_{0};
};
Counting* Counting::instance = nullptr;

constexpr std::int64_t kRows = 20000;
constexpr std::int64_t kColumns = 32;

TableBatch make_batch(OptimizerKind kind) {
  TableBatchOptions options;
  options.gradients = GradientForm::kFused;
  options.optimizer.kind = kind;
  at::Tensor weight = empty_rows(kRows, kColumns, at::kFloat);
  weight.fill_(0.5);
  return {{{"t", weight, PoolingType::kMean}}, {{"f", 0}}, options};
}

TEST(TableMemory, IsTheTableAndItsState) {
  const std::int64_t table = kRows * kColumns * 4;
  const std::int64_t row_wise = kRows * 4;
  const std::pair<OptimizerKind, std::int64_t> kinds[] = {
      {OptimizerKind::kSgd, 0},
      {OptimizerKind::kAdagrad, table},
      {OptimizerKind::kRowWiseAdagrad, row_wise},
      {OptimizerKind::kAdam, 2 * table},
      {OptimizerKind::kAdamW, 2 * table},
      {OptimizerKind::kPartialRowWiseAdam, table + row_wise},
      {OptimizerKind::kLamb, 2 * table},
      {OptimizerKind::kPartialRowWiseLamb, table + row_wise},
      {OptimizerKind::kLarsSgd, table}};
  for (const auto& [kind, state] : kinds) {
    Counting counting;
    const TableBatch batch = make_batch(kind);
    EXPECT_GE(counting.live(), table + state) << name_of(kind);
    EXPECT_LE(static_cast<double>(counting.live() + batch.workspace_bytes()),
              1.01 * static_cast<double>(table + state))
        << name_of(kind);
  }
}

TEST(TableMemory, StepsAllocateNothingButTheirResults) {
  const std::int64_t samples = 512;
  const at::Tensor ids = at::arange(samples * 10, at::kLong).mul(7919).remainder(kRows);
  const at::Tensor offsets = at::arange(0, samples * 10 + 1, 10, at::kLong);
  const at::Tensor gradient = at::ones({samples, kColumns});
  for (const OptimizerKind kind :
       {OptimizerKind::kSgd, OptimizerKind::kRowWiseAdagrad, OptimizerKind::kAdam}) {
    const TableBatch batch = make_batch(kind);
    const auto step = [&] { batch.pooled({ids, offsets}).backward(gradient); };
    for (int i = 0; i < 3; ++i) step();
    Counting counting;
    const std::int64_t before = num_large;
    for (int i = 0; i < 5; ++i) step();
    EXPECT_EQ(num_large - before, 5) << name_of(kind);  // the pooled rows of each step
    EXPECT_EQ(counting.live(), 0) << name_of(kind);

    at::Tensor output = at::empty({samples, kColumns});
    batch.pooled_out({ids, offsets}, output);
    const std::int64_t again = num_large;
    for (int i = 0; i < 5; ++i) batch.pooled_out({ids, offsets}, output);
    EXPECT_EQ(num_large, again) << name_of(kind);
  }
}

}  // namespace
}  // namespace tessera::embedding
