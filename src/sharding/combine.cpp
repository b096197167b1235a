#include "sharding/combine.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "core/autograd.h"
#include "core/kept_memory.h"
#include "kernels/combine.h"

namespace tessera::sharding {
namespace {

// Numbers below which another thread is not worth waking.
constexpr std::int64_t kGrain = 32768;

struct Combined : torch::CustomClassHolder {
  CombinePlan plan;
  std::vector<std::int64_t> sizes;  // of the sources
};
using CombinedPtr = c10::intrusive_ptr<Combined>;

kernels::RowBlock block_of(const CombinePlan& plan, const CombinePiece& piece, float* data) {
  kernels::RowBlock block;
  block.data = data + piece.begin;
  block.columns = piece.columns;
  block.column = piece.column;
  block.is_added = piece.is_added;
  const at::Tensor& inverse = plan.inverse[piece.feature];
  if (inverse.defined()) block.sample = inverse.const_data_ptr<std::int64_t>();
  if (piece.is_divided) block.factor = plan.factors[piece.feature].const_data_ptr<float>();
  return block;
}

struct Combine : Function<Combine> {
  static Variable forward(AutogradContext* context, at::TensorList sources,
                          const CombinedPtr& combined) {
    carry(context, combined);
    const CombinePlan& plan = combined->plan;
    std::vector<at::Tensor> flat;
    for (const at::Tensor& source : sources) {
      flat.push_back(source.contiguous());
      combined->sizes.push_back(source.numel());
    }
    at::Tensor output = core::empty_kept({plan.rows, plan.columns}, at::kFloat);
    std::vector<kernels::RowBlock> blocks;
    for (const CombinePiece& piece : plan.pieces) {
      blocks.push_back(block_of(plan, piece, flat[piece.source].data_ptr<float>()));
    }
    auto* values = output.data_ptr<float>();
    at::parallel_for(0, plan.rows, std::max<std::int64_t>(1, kGrain / (plan.columns + 1)),
                     [&](std::int64_t begin, std::int64_t end) {
                       kernels::combine_kernels().combine(blocks.data(),
                                                          static_cast<std::int64_t>(blocks.size()),
                                                          begin, end, plan.columns, values);
                     });
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto combined = carried<Combined>(context);
    const CombinePlan& plan = combined->plan;
    at::Tensor gradient = gradients[0].to(at::kFloat);
    if (gradient.numel() > 0 && gradient.stride(1) != 1) gradient = gradient.contiguous();
    const std::int64_t stride = gradient.numel() > 0 ? gradient.stride(0) : plan.columns;
    variable_list found(combined->sizes.size() + 1);
    for (std::size_t s = 0; s < combined->sizes.size(); ++s) {
      if (!context->needs_input_grad(s)) continue;
      // Samples that several rows read, or none, are summed up from zero.
      found[s] = plan.gradient_memory ? plan.gradient_memory(s, combined->sizes[s])
                                      : core::empty_kept({combined->sizes[s]}, at::kFloat);
      if (std::any_of(plan.inverse.begin(), plan.inverse.end(),
                      [](const at::Tensor& inverse) { return inverse.defined(); })) {
        found[s].zero_();
      }
    }
    const auto num_pieces = static_cast<std::int64_t>(plan.pieces.size());
    const std::int64_t numbers = plan.rows * plan.columns / std::max<std::int64_t>(1, num_pieces);
    const auto* values = gradient.const_data_ptr<float>();
    at::parallel_for(0, num_pieces, std::max<std::int64_t>(1, kGrain / (numbers + 1)),
                     [&](std::int64_t begin, std::int64_t end) {
                       for (std::int64_t p = begin; p < end; ++p) {
                         const CombinePiece& piece = plan.pieces[static_cast<std::size_t>(p)];
                         if (!found[piece.source].defined()) continue;
                         kernels::combine_kernels().spread(
                             block_of(plan, piece, found[piece.source].data_ptr<float>()), 0,
                             plan.rows, values, stride);
                       }
                     });
    return found;
  }
};

// The same of whole tensors, for devices without kernels.
at::Tensor compose(const CombinePlan& plan, const std::vector<at::Tensor>& sources) {
  std::vector<at::Tensor> columns;
  for (const CombinePiece& piece : plan.pieces) {
    at::Tensor block = sources[piece.source]
                           .narrow(0, piece.begin, piece.batch * piece.columns)
                           .view({piece.batch, piece.columns});
    if (piece.is_divided) block = block.mul(plan.factors[piece.feature].unsqueeze(1));
    const at::Tensor& inverse = plan.inverse[piece.feature];
    if (inverse.defined()) block = block.index_select(0, inverse);
    if (piece.is_added) {
      columns.back() = columns.back().add(block);
    } else {
      columns.push_back(block);
    }
  }
  return columns.size() == 1 ? columns[0].clone() : at::cat(columns, 1);
}

}  // namespace

at::Tensor combine(CombinePlan plan, const std::vector<at::Tensor>& sources) {
  if (!sources[0].is_cpu()) {
    const at::Tensor result = compose(plan, sources);
    if (result.requires_grad()) {
      result.register_hook([owner = plan.owner](const at::Tensor& gradient) { return gradient; });
    }
    return result;
  }
  auto combined = c10::make_intrusive<Combined>();
  combined->plan = std::move(plan);
  return Combine::apply(at::TensorList(sources), combined);
}

}  // namespace tessera::sharding
