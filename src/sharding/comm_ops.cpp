#include "tessera/sharding/comm_ops.h"

#include <atomic>
#include <numeric>
#include <utility>

#include <ATen/ATen.h>

#include "sharding/exchange.h"
#include "sharding/flat_exchange.h"
#include "sharding/sizes.h"
#include "tessera/core/check.h"

namespace tessera::sharding {
namespace {

using comm::Codecs;
using comm::Group;

std::atomic<bool> divides_gradients{true};

std::int64_t dot(const Sizes& a, const Sizes& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), std::int64_t{0});
}

Sizes times(const Sizes& sizes, std::int64_t factor) {
  Sizes result = sizes;
  for (auto& size : result) size *= factor;
  return result;
}

void check_per_rank(const char* op, const char* what, std::size_t given, const Group& group) {
  TESSERA_CHECK_VALUE(static_cast<int>(given) == group.size(), "sharding.", op, ": ", given, " ",
                      what, " were given for a group of ", group.size(), " ranks.");
}

void check_not_negative(const char* op, const char* what, const Sizes& sizes) {
  for (const std::int64_t size : sizes) {
    TESSERA_CHECK_VALUE(size >= 0, "sharding.", op, ": ", what, " ", sizes,
                        " has a negative entry.");
  }
}

void check_linear(const char* op, const Codecs& codecs) {
  TESSERA_CHECK_VALUE(codecs.forward.is_linear(), "sharding.", op,
                      ": sums are made of encoded values, so only fp16 and bf16 may encode them.");
}

// Columns [begin of r, end of r) of a [rows, all columns] matrix, rank after rank, flat.
at::Tensor columns_to_blocks(const at::Tensor& matrix, const Sizes& columns) {
  at::Tensor flat = at::empty({matrix.numel()}, matrix.options());
  std::int64_t begin = 0;
  const std::int64_t rows = matrix.size(0);
  for (const std::int64_t width : columns) {
    flat.narrow(0, begin * rows, rows * width)
        .view({rows, width})
        .copy_(matrix.narrow(1, begin, width));
    begin += width;
  }
  return flat;
}

at::Tensor blocks_to_columns(const at::Tensor& flat, std::int64_t rows, const Sizes& columns) {
  at::Tensor matrix = at::empty({rows, total(columns)}, flat.options());
  std::int64_t begin = 0;
  for (const std::int64_t width : columns) {
    matrix.narrow(1, begin, width)
        .copy_(flat.narrow(0, begin * rows, rows * width).view({rows, width}));
    begin += width;
  }
  return matrix;
}

// In a group of one rank the input is the result.
PlannedExchange plan(FlatPlan exchange) {
  return PlannedExchange(exchange.group.size() == 1 ? nullptr : make_exchange(std::move(exchange)));
}

// A matrix whose columns lie rank after rank.
Writing in_columns(std::int64_t rows, const Sizes& columns) {
  return {[=](const at::Tensor& matrix) { return columns_to_blocks(matrix, columns); },
          [=](const at::Tensor& flat) { return blocks_to_columns(flat, rows, columns); }};
}

PlannedExchange planned_pooled(const Sizes& batches, const Sizes& dims, const Group& group,
                               const Codecs& codecs, double factor) {
  const std::int64_t rows = batches[group.rank()];
  const std::int64_t columns = dims[group.rank()];
  return plan({Movement::kAllToAll, times(batches, columns), times(dims, rows),
               in_shape({total(batches), columns}), in_columns(rows, dims), group, codecs, factor});
}

// The rows of all segments, segment recat[0] first.
at::Tensor rows_of_segments(const at::Tensor& lengths, const at::Tensor& recat) {
  const at::Tensor ends = lengths.cumsum(0);
  const at::Tensor picked = lengths.index_select(0, recat);
  const at::Tensor starts = (ends - lengths).index_select(0, recat);
  const at::Tensor places = picked.cumsum(0) - picked;
  const auto count = picked.sum().item<std::int64_t>();
  return at::arange(count, lengths.options()) +
         (starts - places).repeat_interleave(picked, std::nullopt, count);
}

// Rows that are sent in one order and come back in another; none: they stay as they are.
Writing in_order(const at::Tensor& sent, const at::Tensor& back, const Sizes& shape) {
  Writing writing = in_shape(shape);
  if (!sent.defined()) return writing;
  return {[=](const at::Tensor& rows) { return rows.index_select(0, sent).view({-1}); },
          [=](const at::Tensor& flat) { return flat.view(shape).index_select(0, back); }};
}

PlannedExchange planned_sum(const Sizes& parts, const Sizes& input_shape, const Sizes& own_shape,
                            const Group& group, const Codecs& codecs) {
  const Sizes own{parts[group.rank()]};
  return plan({Movement::kReduceScatter, parts, own, in_shape(input_shape), in_shape(own_shape),
               group, codecs, gradient_factor(group)});
}

PlannedExchange planned_row_sum(const char* op, const at::Tensor& input, const Sizes& rows,
                                const Group& group, const Codecs& codecs) {
  check_per_rank(op, "splits", rows.size(), group);
  check_not_negative(op, "input_splits", rows);
  check_linear(op, codecs);
  TESSERA_CHECK_VALUE(input.dim() >= 1 && input.size(0) == total(rows), "sharding.", op,
                      ": the splits ", rows, " add up to ", total(rows), ", the input has shape ",
                      input.sizes(), ".");
  const std::int64_t width = c10::multiply_integers(input.sizes().slice(1));
  Sizes shape = input.sizes().vec();
  shape[0] = rows[group.rank()];
  return planned_sum(times(rows, width), input.sizes().vec(), shape, group, codecs);
}

// A group of one rank: the input is the result.
class NoExchange final : public Exchange {
 public:
  Pending start(const at::Tensor& input) override {
    return [=] { return input; };
  }
  Pending start_backward(const at::Tensor& gradient) override {
    return [=] { return gradient; };
  }
};

}  // namespace

void set_gradient_division(bool is_on) { divides_gradients = is_on; }

bool get_gradient_division() noexcept { return divides_gradients; }

PlannedExchange::PlannedExchange(std::shared_ptr<Exchange> exchange)
    : exchange_(std::move(exchange)) {}

Request PlannedExchange::run(const at::Tensor& input) const {
  if (!exchange_) return comm::NoWait<at::Tensor>(input);
  return sharding::run(exchange_, input);
}

void PlannedExchange::start(const at::Tensor& input) {
  journey_ = std::make_shared<Journey>(exchange_ ? exchange_ : std::make_shared<NoExchange>());
  journey_->start(input);
}

at::Tensor PlannedExchange::wait() { return journey_->wait().front(); }

void PlannedExchange::start_backward(const at::Tensor& gradient) {
  journey_->start_backward({gradient});
}

at::Tensor PlannedExchange::wait_backward() { return journey_->wait_backward(); }

namespace planned {

PlannedExchange alltoall_pooled(const at::Tensor& pooled, const Sizes& batch_size_per_rank,
                                const Sizes& dim_sum_per_rank, const Group& group,
                                const Codecs& codecs) {
  constexpr const char* kOp = "alltoall_pooled";
  check_per_rank(kOp, "batch sizes", batch_size_per_rank.size(), group);
  check_per_rank(kOp, "dim sums", dim_sum_per_rank.size(), group);
  check_not_negative(kOp, "batch_size_per_rank", batch_size_per_rank);
  check_not_negative(kOp, "dim_sum_per_rank", dim_sum_per_rank);
  const Sizes expected{total(batch_size_per_rank), dim_sum_per_rank[group.rank()]};
  TESSERA_CHECK_VALUE(pooled.sizes() == at::IntArrayRef(expected),
                      "sharding.alltoall_pooled: rank ", group.rank(), " gives shape ",
                      pooled.sizes(), ", but the batches ", batch_size_per_rank, " and dims ",
                      dim_sum_per_rank, " make it ", expected, ".");
  return planned_pooled(batch_size_per_rank, dim_sum_per_rank, group, codecs,
                        gradient_factor(group));
}

PlannedExchange variable_batch_alltoall_pooled(
    const at::Tensor& pooled, const std::vector<Sizes>& batch_size_per_rank_per_feature,
    const Sizes& batch_size_per_feature_pre_a2a,
    const std::vector<Sizes>& emb_dim_per_rank_per_feature, const Group& group,
    const Codecs& codecs) {
  constexpr const char* kOp = "variable_batch_alltoall_pooled";
  check_per_rank(kOp, "lists of dims", emb_dim_per_rank_per_feature.size(), group);
  const Sizes& my_dims = emb_dim_per_rank_per_feature[group.rank()];
  // A rank without features may leave its batches out.
  Sizes sent(group.size(), 0);
  if (!batch_size_per_rank_per_feature.empty()) {
    check_per_rank(kOp, "lists of batch sizes", batch_size_per_rank_per_feature.size(), group);
    for (int r = 0; r < group.size(); ++r) {
      const Sizes& batches = batch_size_per_rank_per_feature[r];
      TESSERA_CHECK_VALUE(batches.size() == my_dims.size(), "sharding.", kOp, ": rank ", r, " has ",
                          batches.size(), " batch sizes for this rank's ", my_dims.size(),
                          " features.");
      sent[r] = dot(batches, my_dims);
    }
  }
  Sizes received;
  auto batch = batch_size_per_feature_pre_a2a.begin();
  for (const Sizes& dims : emb_dim_per_rank_per_feature) {
    TESSERA_CHECK_VALUE(
        batch_size_per_feature_pre_a2a.end() - batch >= static_cast<std::ptrdiff_t>(dims.size()),
        "sharding.", kOp, ": ", batch_size_per_feature_pre_a2a.size(),
        " batch sizes before the exchange are fewer than the features of all ranks.");
    std::int64_t count = 0;
    for (const std::int64_t dim : dims) count += *batch++ * dim;
    received.push_back(count);
  }
  TESSERA_CHECK_VALUE(batch == batch_size_per_feature_pre_a2a.end(), "sharding.", kOp, ": ",
                      batch_size_per_feature_pre_a2a.size(),
                      " batch sizes before the exchange are more than the features of all ranks.");
  TESSERA_CHECK_VALUE(pooled.dim() == 1 && pooled.numel() == total(sent), "sharding.", kOp,
                      ": the batches and dims make ", total(sent), " values, the input has shape ",
                      pooled.sizes(), ".");
  return plan({Movement::kAllToAll, sent, received, in_shape(pooled.sizes().vec()),
               in_shape({total(received)}), group, codecs, gradient_factor(group)});
}

PlannedExchange alltoall_sequence(const at::Tensor& embeddings, const at::Tensor& forward_recat,
                                  const at::Tensor& backward_recat, const at::Tensor& lengths,
                                  const Sizes& input_splits, const Sizes& output_splits,
                                  const Group& group, const Codecs& codecs) {
  constexpr const char* kOp = "alltoall_sequence";
  check_per_rank(kOp, "input splits", input_splits.size(), group);
  check_per_rank(kOp, "output splits", output_splits.size(), group);
  check_not_negative(kOp, "input_splits", input_splits);
  check_not_negative(kOp, "output_splits", output_splits);
  TESSERA_CHECK_VALUE(embeddings.dim() == 2 && embeddings.size(0) == total(output_splits),
                      "sharding.", kOp, ": ", total(output_splits),
                      " ids were received, the embeddings have shape ", embeddings.sizes(), ".");
  at::Tensor forward_rows;
  at::Tensor backward_rows;
  const bool has_segments = forward_recat.defined() && forward_recat.numel() > 0;
  if (has_segments) {
    TESSERA_CHECK_VALUE(backward_recat.numel() == forward_recat.numel() &&
                            lengths.numel() % forward_recat.numel() == 0,
                        "sharding.", kOp, ": ", forward_recat.numel(), " and ",
                        backward_recat.numel(), " segments are ordered, there are ",
                        lengths.numel(), " lengths.");
    const at::Tensor segments =
        lengths.to(at::kLong)
            .reshape({forward_recat.numel(), lengths.numel() / forward_recat.numel()})
            .sum(1);
    const at::Tensor order = forward_recat.to(at::kLong);
    forward_rows = rows_of_segments(segments, order);
    backward_rows = rows_of_segments(segments.index_select(0, order), backward_recat.to(at::kLong));
    TESSERA_CHECK_VALUE(forward_rows.numel() == embeddings.size(0), "sharding.", kOp,
                        ": the lengths add up to ", forward_rows.numel(), ", there are ",
                        embeddings.size(0), " embeddings.");
  }
  const std::int64_t dim = embeddings.size(1);
  return plan({Movement::kAllToAll, times(output_splits, dim), times(input_splits, dim),
               in_order(forward_rows, backward_rows, embeddings.sizes().vec()),
               in_shape({total(input_splits), dim}), group, codecs, gradient_factor(group)});
}

PlannedExchange alltoallv(const at::Tensor& columns, const Sizes& out_split, const Group& group,
                          const Codecs& codecs) {
  constexpr const char* kOp = "alltoallv";
  check_per_rank(kOp, "out_split entries", out_split.size(), group);
  TESSERA_CHECK_VALUE(columns.size(1) == out_split[group.rank()], "sharding.", kOp, ": rank ",
                      group.rank(), " gives ", columns.size(1), " columns, its out_split is ",
                      out_split[group.rank()], ".");
  const std::int64_t rows = columns.size(0);
  Sizes batches(group.size(), rows / group.size());
  for (std::int64_t r = 0; r < rows % group.size(); ++r) ++batches[r];
  return planned_pooled(batches, out_split, group, codecs, /*factor=*/1.0);
}

PlannedExchange reduce_scatter_pooled(const std::vector<Sizes>& shapes, const Group& group,
                                      const Codecs& codecs) {
  constexpr const char* kOp = "reduce_scatter_pooled";
  check_per_rank(kOp, "inputs", shapes.size(), group);
  check_linear(kOp, codecs);
  Sizes parts;
  for (const Sizes& shape : shapes) parts.push_back(c10::multiply_integers(shape));
  return planned_sum(parts, {total(parts)}, shapes[group.rank()], group, codecs);
}

PlannedExchange reduce_scatter_base_pooled(const at::Tensor& input, const Group& group,
                                           const Codecs& codecs) {
  TESSERA_CHECK_VALUE(input.dim() >= 1 && input.size(0) % group.size() == 0,
                      "sharding.reduce_scatter_base_pooled: shape ", input.sizes(),
                      " has rows that ", group.size(), " ranks cannot share evenly.");
  return planned_row_sum("reduce_scatter_base_pooled", input,
                         Sizes(group.size(), input.size(0) / group.size()), group, codecs);
}

PlannedExchange reduce_scatter_v_pooled(const at::Tensor& input, const Sizes& input_splits,
                                        const Group& group, const Codecs& codecs) {
  return planned_row_sum("reduce_scatter_v_pooled", input, input_splits, group, codecs);
}

PlannedExchange reduce_scatter_v_per_feature_pooled(
    const at::Tensor& input, const std::vector<Sizes>& batch_size_per_rank_per_feature,
    const Sizes& embedding_dims, const Group& group, const Codecs& codecs) {
  constexpr const char* kOp = "reduce_scatter_v_per_feature_pooled";
  check_per_rank(kOp, "lists of batch sizes", batch_size_per_rank_per_feature.size(), group);
  Sizes parts;
  for (const Sizes& batches : batch_size_per_rank_per_feature) {
    TESSERA_CHECK_VALUE(batches.size() == embedding_dims.size(), "sharding.", kOp, ": ",
                        batches.size(), " batch sizes were given for ", embedding_dims.size(),
                        " features.");
    parts.push_back(dot(batches, embedding_dims));
  }
  TESSERA_CHECK_VALUE(input.dim() == 1, "sharding.", kOp, ": the input is flat, not of shape ",
                      input.sizes(), ".");
  return planned_row_sum(kOp, input, parts, group, codecs);
}

PlannedExchange all_gather_base_pooled(const at::Tensor& input, const Group& group,
                                       const Codecs& codecs) {
  TESSERA_CHECK_VALUE(input.dim() >= 1,
                      "sharding.all_gather_base_pooled: a tensor without rows cannot be stacked.");
  TESSERA_CHECK_VALUE(codecs.backward.is_linear(),
                      "sharding.all_gather_base_pooled: its gradients are summed, so only fp16 and "
                      "bf16 may encode them.");
  Sizes shape = input.sizes().vec();
  shape[0] *= group.size();
  return plan({Movement::kAllGather,
               {input.numel()},
               Sizes(group.size(), input.numel()),
               in_shape(input.sizes().vec()),
               in_shape(shape),
               group,
               codecs,
               gradient_factor(group)});
}

}  // namespace planned

Request alltoall_pooled(const at::Tensor& pooled, const Sizes& batch_size_per_rank,
                        const Sizes& dim_sum_per_rank, const Group& group, const Codecs& codecs) {
  return planned::alltoall_pooled(pooled, batch_size_per_rank, dim_sum_per_rank, group, codecs)
      .run(pooled);
}

Request variable_batch_alltoall_pooled(const at::Tensor& pooled,
                                       const std::vector<Sizes>& batch_size_per_rank_per_feature,
                                       const Sizes& batch_size_per_feature_pre_a2a,
                                       const std::vector<Sizes>& emb_dim_per_rank_per_feature,
                                       const Group& group, const Codecs& codecs) {
  return planned::variable_batch_alltoall_pooled(pooled, batch_size_per_rank_per_feature,
                                                 batch_size_per_feature_pre_a2a,
                                                 emb_dim_per_rank_per_feature, group, codecs)
      .run(pooled);
}

Request alltoall_sequence(const at::Tensor& embeddings, const at::Tensor& forward_recat,
                          const at::Tensor& backward_recat, const at::Tensor& lengths,
                          const Sizes& input_splits, const Sizes& output_splits, const Group& group,
                          const Codecs& codecs) {
  return planned::alltoall_sequence(embeddings, forward_recat, backward_recat, lengths,
                                    input_splits, output_splits, group, codecs)
      .run(embeddings);
}

ListRequest alltoallv(const std::vector<at::Tensor>& inputs, const Sizes& out_split,
                      const Group& group, const Codecs& codecs) {
  TESSERA_CHECK_VALUE(!inputs.empty(), "sharding.alltoallv: no inputs were given.");
  const at::Tensor columns = at::cat(inputs, 1);
  auto request = planned::alltoallv(columns, out_split, group, codecs).run(columns);
  return ListRequest([=] { return request.wait().split_with_sizes(out_split, 1); });
}

Request reduce_scatter_pooled(const std::vector<at::Tensor>& inputs, const Group& group,
                              const Codecs& codecs) {
  std::vector<Sizes> shapes;
  std::vector<at::Tensor> flat;
  for (const at::Tensor& input : inputs) {
    shapes.push_back(input.sizes().vec());
    flat.push_back(input.reshape({-1}));
  }
  const auto planned = planned::reduce_scatter_pooled(shapes, group, codecs);
  return planned.run(group.size() == 1 ? inputs[0] : at::cat(flat));
}

Request reduce_scatter_base_pooled(const at::Tensor& input, const Group& group,
                                   const Codecs& codecs) {
  return planned::reduce_scatter_base_pooled(input, group, codecs).run(input);
}

Request reduce_scatter_v_pooled(const at::Tensor& input, const Sizes& input_splits,
                                const Group& group, const Codecs& codecs) {
  return planned::reduce_scatter_v_pooled(input, input_splits, group, codecs).run(input);
}

Request reduce_scatter_v_per_feature_pooled(
    const at::Tensor& input, const std::vector<Sizes>& batch_size_per_rank_per_feature,
    const Sizes& embedding_dims, const Group& group, const Codecs& codecs) {
  return planned::reduce_scatter_v_per_feature_pooled(input, batch_size_per_rank_per_feature,
                                                      embedding_dims, group, codecs)
      .run(input);
}

Request all_gather_base_pooled(const at::Tensor& input, const Group& group, const Codecs& codecs) {
  return planned::all_gather_base_pooled(input, group, codecs).run(input);
}

}  // namespace tessera::sharding
