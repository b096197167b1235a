#include "collision/home_rows.h"

#include <algorithm>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include "core/autograd.h"
#include "core/kept_memory.h"

namespace tessera::collision {
namespace {

// Bags of one thread at least.
constexpr std::int64_t kBagGrain = 256;

struct Plan : torch::CustomClassHolder {
  explicit Plan(HomePlan given) : plan(std::move(given)) {}
  HomePlan plan;
};
using PlanPtr = c10::intrusive_ptr<Plan>;

/// Calls `each(block, bag, first id, end)` for every bag of every block, on several threads.
template <typename Each>
void for_bags(const HomePlan& plan, const Each& each) {
  const auto num_blocks = static_cast<std::int64_t>(plan.blocks.size());
  at::parallel_for(
      0, num_blocks * plan.num_bags, kBagGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const HomeBlock& block = plan.blocks[static_cast<std::size_t>(i / plan.num_bags)];
          const std::int64_t bag = i % plan.num_bags;
          const auto place = static_cast<std::size_t>(bag);
          each(block, bag, block.offsets[place], block.offsets[place + 1]);
        }
      });
}

struct AtHome : Function<AtHome> {
  static Variable forward(AutogradContext* context, const Variable& arrived, const PlanPtr& held) {
    carry(context, held);
    context->saved_data["size"] = arrived.numel();
    const HomePlan& plan = held->plan;
    const at::Tensor values = arrived.contiguous();
    const auto* from = values.const_data_ptr<float>();
    at::Tensor result = core::empty_kept({plan.num_bags, plan.num_columns}, values.options());
    auto* to = result.data_ptr<float>();
    for_bags(plan, [&](const HomeBlock& block, std::int64_t bag, std::int64_t id,
                       std::int64_t end) {
      float* row = to + bag * plan.num_columns + block.first_column;
      if (id == end) {
        std::fill_n(row, block.num_columns, 0.0F);
        return;
      }
      // As owners sum and divide that have whole bags: from zero, and by one factor.
      const auto place = [&](std::int64_t i) { return block.places[static_cast<std::size_t>(i)]; };
      const float* first = from + place(id);
      for (std::int64_t c = 0; c < block.num_columns; ++c) row[c] = 0.0F + first[c];
      for (std::int64_t i = id + 1; i < end; ++i) {
        const float* other = from + place(i);
        for (std::int64_t c = 0; c < block.num_columns; ++c) row[c] += other[c];
      }
      if (!block.is_mean || end - id == 1) return;
      const float factor = 1.0F / static_cast<float>(end - id);
      for (std::int64_t c = 0; c < block.num_columns; ++c) row[c] *= factor;
    });
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto held = carried<Plan>(context);
    const HomePlan& plan = held->plan;
    const at::Tensor gradient = gradients[0].to(at::kFloat).contiguous();
    const auto* from = gradient.const_data_ptr<float>();
    const std::int64_t size = context->saved_data["size"].toInt();
    at::Tensor result = plan.is_whole ? core::empty_kept({size}, gradient.options())
                                      : at::zeros({size}, gradient.options());
    auto* to = result.data_ptr<float>();
    for_bags(plan,
             [&](const HomeBlock& block, std::int64_t bag, std::int64_t id, std::int64_t end) {
               const float* row = from + bag * plan.num_columns + block.first_column;
               const float factor = 1.0F / static_cast<float>(end - id);
               for (std::int64_t i = id; i < end; ++i) {
                 float* own = to + block.places[static_cast<std::size_t>(i)];
                 std::copy_n(row, block.num_columns, own);
                 if (!block.is_mean || end - id == 1) continue;
                 for (std::int64_t c = 0; c < block.num_columns; ++c) own[c] *= factor;
               }
             });
    return {result, Variable()};
  }
};

}  // namespace

at::Tensor rows_at_home(const at::Tensor& arrived, HomePlan plan) {
  return AtHome::apply(arrived, c10::make_intrusive<Plan>(std::move(plan)));
}

}  // namespace tessera::collision
