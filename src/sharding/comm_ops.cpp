#include "tessera/sharding/comm_ops.h"

#include <atomic>
#include <numeric>
#include <utility>

#include <ATen/ATen.h>

#include "sharding/exchange.h"
#include "sharding/flat_exchange.h"
#include "sharding/sizes.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"

namespace tessera::sharding {
namespace {

using comm::Codec;
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

// Flat values, cut into `parts`, are summed over the ranks; this rank keeps its own part.
Exchange::Pending reduce_scatter_flat(const at::Tensor& values, const Sizes& parts,
                                      const Codec& codec, const Group& group) {
  const auto dtype = values.scalar_type();
  auto work = comm::reduce_scatter_v_async(codec.encode(values, parts), parts, group);
  return [=] { return codec.decode(work.wait(), {parts[group.rank()]}, dtype); };
}

// The parts of all ranks, `parts[r]` values of rank r, one after the other.
Exchange::Pending all_gather_flat(const at::Tensor& values, const Sizes& parts, const Codec& codec,
                                  const Group& group) {
  const auto dtype = values.scalar_type();
  const at::Tensor wire = codec.encode(values, {values.numel()});
  auto work = comm::all_gather_v_async(wire, group, wire_sizes(parts, codec));
  return [=] { return codec.decode(work.wait(), parts, dtype); };
}

at::Tensor scaled(at::Tensor gradient, double factor) {
  return factor == 1.0 ? gradient : gradient.mul_(factor);
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

class PooledAllToAll final : public Exchange {
 public:
  PooledAllToAll(Sizes batches, Sizes dims, const Group& group, Codecs codecs, double factor)
      : batches_(std::move(batches)),
        dims_(std::move(dims)),
        group_(group),
        codecs_(codecs),
        factor_(factor),
        rows_(batches_[group.rank()]),
        sent_(times(batches_, dims_[group.rank()])),
        received_(times(dims_, rows_)) {}

  Pending start(const at::Tensor& input) override {
    auto pending =
        all_to_all_flat(input.contiguous().view({-1}), sent_, received_, codecs_.forward, group_);
    return [=, this] { return blocks_to_columns(pending(), rows_, dims_); };
  }

  Pending start_backward(const at::Tensor& gradient) override {
    auto pending = all_to_all_flat(columns_to_blocks(gradient, dims_), received_, sent_,
                                   codecs_.backward, group_);
    return [=, this] {
      return scaled(pending(), factor_).view({total(batches_), dims_[group_.rank()]});
    };
  }

 private:
  Sizes batches_;
  Sizes dims_;
  Group group_;
  Codecs codecs_;
  double factor_;
  std::int64_t rows_;
  Sizes sent_;
  Sizes received_;
};

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

class SequenceAllToAll final : public Exchange {
 public:
  SequenceAllToAll(at::Tensor forward_rows, at::Tensor backward_rows, std::int64_t dim,
                   const Sizes& sent, const Sizes& received, const Group& group, Codecs codecs)
      : forward_rows_(std::move(forward_rows)),
        backward_rows_(std::move(backward_rows)),
        dim_(dim),
        sent_(times(sent, dim)),
        received_(times(received, dim)),
        group_(group),
        codecs_(codecs),
        factor_(gradient_factor(group)) {}

  Pending start(const at::Tensor& input) override {
    const at::Tensor ordered =
        forward_rows_.defined() ? input.index_select(0, forward_rows_) : input.contiguous();
    auto pending = all_to_all_flat(ordered.view({-1}), sent_, received_, codecs_.forward, group_);
    return [=, this] { return pending().view({-1, dim_}); };
  }

  Pending start_backward(const at::Tensor& gradient) override {
    auto pending = all_to_all_flat(gradient.contiguous().view({-1}), received_, sent_,
                                   codecs_.backward, group_);
    return [=, this] {
      const at::Tensor ordered = scaled(pending(), factor_).view({-1, dim_});
      return backward_rows_.defined() ? ordered.index_select(0, backward_rows_) : ordered;
    };
  }

 private:
  at::Tensor forward_rows_;  // undefined: they stay as they are
  at::Tensor backward_rows_;
  std::int64_t dim_;
  Sizes sent_;
  Sizes received_;
  Group group_;
  Codecs codecs_;
  double factor_;
};

class FlatReduceScatter final : public Exchange {
 public:
  FlatReduceScatter(Sizes parts, Sizes shape, const Group& group, Codecs codecs)
      : parts_(std::move(parts)),
        shape_(std::move(shape)),
        group_(group),
        codecs_(codecs),
        factor_(gradient_factor(group)) {}

  Pending start(const at::Tensor& input) override {
    input_shape_ = input.sizes().vec();
    auto pending =
        reduce_scatter_flat(input.contiguous().view({-1}), parts_, codecs_.forward, group_);
    return [=, this] { return pending().view(shape_); };
  }

  Pending start_backward(const at::Tensor& gradient) override {
    auto pending =
        all_gather_flat(gradient.contiguous().view({-1}), parts_, codecs_.backward, group_);
    return [=, this] { return scaled(pending(), factor_).view(input_shape_); };
  }

 private:
  Sizes parts_;
  Sizes shape_;  // of this rank's part
  Sizes input_shape_;
  Group group_;
  Codecs codecs_;
  double factor_;
};

class RowGather final : public Exchange {
 public:
  RowGather(const Group& group, Codecs codecs)
      : group_(group), codecs_(codecs), factor_(gradient_factor(group)) {}

  Pending start(const at::Tensor& input) override {
    shape_ = input.sizes().vec();
    parts_ = Sizes(group_.size(), input.numel());
    auto pending = all_gather_flat(input.contiguous().view({-1}), parts_, codecs_.forward, group_);
    Sizes shape = shape_;
    shape[0] *= group_.size();
    return [=] { return pending().view(shape); };
  }

  Pending start_backward(const at::Tensor& gradient) override {
    auto pending =
        reduce_scatter_flat(gradient.contiguous().view({-1}), parts_, codecs_.backward, group_);
    return [=, this] { return scaled(pending(), factor_).view(shape_); };
  }

 private:
  Sizes shape_;
  Sizes parts_;
  Group group_;
  Codecs codecs_;
  double factor_;
};

Request at_once(const at::Tensor& result) { return comm::NoWait<at::Tensor>(result); }

Request reduce_scatter_rows(const char* op, const at::Tensor& input, const Sizes& rows,
                            const Group& group, const Codecs& codecs) {
  check_per_rank(op, "splits", rows.size(), group);
  check_not_negative(op, "input_splits", rows);
  check_linear(op, codecs);
  TESSERA_CHECK_VALUE(input.dim() >= 1 && input.size(0) == total(rows), "sharding.", op,
                      ": the splits ", rows, " add up to ", total(rows), ", the input has shape ",
                      input.sizes(), ".");
  if (group.size() == 1) return at_once(input);
  const std::int64_t width = c10::multiply_integers(input.sizes().slice(1));
  Sizes shape = input.sizes().vec();
  shape[0] = rows[group.rank()];
  return run(std::make_shared<FlatReduceScatter>(times(rows, width), shape, group, codecs), input);
}

}  // namespace

void set_gradient_division(bool is_on) { divides_gradients = is_on; }

bool get_gradient_division() noexcept { return divides_gradients; }

Request alltoall_pooled(const at::Tensor& pooled, const Sizes& batch_size_per_rank,
                        const Sizes& dim_sum_per_rank, const Group& group, const Codecs& codecs) {
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
  if (group.size() == 1) return at_once(pooled);
  return run(std::make_shared<PooledAllToAll>(batch_size_per_rank, dim_sum_per_rank, group, codecs,
                                              gradient_factor(group)),
             pooled);
}

Request variable_batch_alltoall_pooled(const at::Tensor& pooled,
                                       const std::vector<Sizes>& batch_size_per_rank_per_feature,
                                       const Sizes& batch_size_per_feature_pre_a2a,
                                       const std::vector<Sizes>& emb_dim_per_rank_per_feature,
                                       const Group& group, const Codecs& codecs) {
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
  return exchange_flat(pooled, sent, received, group, codecs, gradient_factor(group));
}

Request alltoall_sequence(const at::Tensor& embeddings, const at::Tensor& forward_recat,
                          const at::Tensor& backward_recat, const at::Tensor& lengths,
                          const Sizes& input_splits, const Sizes& output_splits, const Group& group,
                          const Codecs& codecs) {
  constexpr const char* kOp = "alltoall_sequence";
  check_per_rank(kOp, "input splits", input_splits.size(), group);
  check_per_rank(kOp, "output splits", output_splits.size(), group);
  check_not_negative(kOp, "input_splits", input_splits);
  check_not_negative(kOp, "output_splits", output_splits);
  TESSERA_CHECK_VALUE(embeddings.dim() == 2 && embeddings.size(0) == total(output_splits),
                      "sharding.", kOp, ": ", total(output_splits),
                      " ids were received, the embeddings have shape ", embeddings.sizes(), ".");
  if (group.size() == 1) return at_once(embeddings);
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
  return run(std::make_shared<SequenceAllToAll>(forward_rows, backward_rows, embeddings.size(1),
                                                output_splits, input_splits, group, codecs),
             embeddings);
}

ListRequest alltoallv(const std::vector<at::Tensor>& inputs, const Sizes& out_split,
                      const Group& group, const Codecs& codecs) {
  constexpr const char* kOp = "alltoallv";
  check_per_rank(kOp, "out_split entries", out_split.size(), group);
  TESSERA_CHECK_VALUE(!inputs.empty(), "sharding.alltoallv: no inputs were given.");
  const at::Tensor input = at::cat(inputs, 1);
  TESSERA_CHECK_VALUE(input.size(1) == out_split[group.rank()], "sharding.", kOp, ": rank ",
                      group.rank(), " gives ", input.size(1), " columns, its out_split is ",
                      out_split[group.rank()], ".");
  const std::int64_t rows = input.size(0);
  Sizes batches(group.size(), rows / group.size());
  for (std::int64_t r = 0; r < rows % group.size(); ++r) ++batches[r];
  const auto cut = [out_split](const at::Tensor& all) {
    return all.split_with_sizes(out_split, 1);
  };
  if (group.size() == 1) return comm::NoWait<std::vector<at::Tensor>>(cut(input));
  auto request = run(
      std::make_shared<PooledAllToAll>(batches, out_split, group, codecs, /*factor=*/1.0), input);
  return ListRequest([=] { return cut(request.wait()); });
}

Request reduce_scatter_pooled(const std::vector<at::Tensor>& inputs, const Group& group,
                              const Codecs& codecs) {
  constexpr const char* kOp = "reduce_scatter_pooled";
  check_per_rank(kOp, "inputs", inputs.size(), group);
  check_linear(kOp, codecs);
  if (group.size() == 1) return at_once(inputs[0]);
  Sizes parts;
  std::vector<at::Tensor> flat;
  for (const at::Tensor& input : inputs) {
    parts.push_back(input.numel());
    flat.push_back(input.reshape({-1}));
  }
  return run(
      std::make_shared<FlatReduceScatter>(parts, inputs[group.rank()].sizes().vec(), group, codecs),
      at::cat(flat));
}

Request reduce_scatter_base_pooled(const at::Tensor& input, const Group& group,
                                   const Codecs& codecs) {
  TESSERA_CHECK_VALUE(input.dim() >= 1 && input.size(0) % group.size() == 0,
                      "sharding.reduce_scatter_base_pooled: shape ", input.sizes(),
                      " has rows that ", group.size(), " ranks cannot share evenly.");
  return reduce_scatter_rows("reduce_scatter_base_pooled", input,
                             Sizes(group.size(), input.size(0) / group.size()), group, codecs);
}

Request reduce_scatter_v_pooled(const at::Tensor& input, const Sizes& input_splits,
                                const Group& group, const Codecs& codecs) {
  return reduce_scatter_rows("reduce_scatter_v_pooled", input, input_splits, group, codecs);
}

Request reduce_scatter_v_per_feature_pooled(
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
  return reduce_scatter_rows(kOp, input, parts, group, codecs);
}

Request all_gather_base_pooled(const at::Tensor& input, const Group& group, const Codecs& codecs) {
  TESSERA_CHECK_VALUE(input.dim() >= 1,
                      "sharding.all_gather_base_pooled: a tensor without rows cannot be stacked.");
  TESSERA_CHECK_VALUE(codecs.backward.is_linear(),
                      "sharding.all_gather_base_pooled: its gradients are summed, so only fp16 and "
                      "bf16 may encode them.");
  if (group.size() == 1) return at_once(input);
  return run(std::make_shared<RowGather>(group, codecs), input);
}

}  // namespace tessera::sharding
