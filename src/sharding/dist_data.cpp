#include "tessera/sharding/dist_data.h"

#include <algorithm>
#include <numeric>

#include <ATen/Functions.h>

#include "sharding/flat_exchange.h"
#include "sharding/sizes.h"
#include "tessera/core/check.h"

namespace tessera::sharding {
namespace {

using comm::Awaitable;
using comm::Codecs;
using comm::Group;
using jagged::KeyedJaggedTensor;

bool all_equal(const Sizes& sizes) {
  return std::all_of(sizes.begin(), sizes.end(),
                     [&](std::int64_t size) { return size == sizes[0]; });
}

}  // namespace

at::Tensor get_recat(std::int64_t local_split, std::int64_t num_splits, int stagger,
                     const Sizes& batch_size_per_rank) {
  if (local_split == 0) return {};
  const std::int64_t step = num_splits / stagger;
  Sizes ranks;
  for (std::int64_t x = 0; x < step; ++x) {
    for (std::int64_t y = 0; y < stagger; ++y) ranks.push_back(x + step * y);
  }
  Sizes order;
  order.reserve(static_cast<std::size_t>(local_split * num_splits));
  for (std::int64_t key = 0; key < local_split; ++key) {
    for (const std::int64_t rank : ranks) order.push_back(key + rank * local_split);
  }
  if (batch_size_per_rank.empty() || all_equal(batch_size_per_rank)) {
    return at::tensor(order, at::kLong);
  }
  // Segments expanded to their samples: those of a rank have its batch each.
  Sizes begins{0};
  for (const std::int64_t size : batch_size_per_rank) {
    for (std::int64_t key = 0; key < local_split; ++key) begins.push_back(begins.back() + size);
  }
  Sizes samples;
  samples.reserve(static_cast<std::size_t>(begins.back()));
  for (const std::int64_t segment : order) {
    const auto at = static_cast<std::size_t>(segment);
    for (std::int64_t sample = begins[at]; sample < begins[at + 1]; ++sample) {
      samples.push_back(sample);
    }
  }
  return at::tensor(samples, at::kLong);
}

KJTSplitsAllToAllMeta::KJTSplitsAllToAllMeta(Group own_group, const KeyedJaggedTensor& features,
                                             const Sizes& splits, int own_stagger)
    : group(std::move(own_group)), input(features), stagger(own_stagger) {
  TESSERA_CHECK_VALUE(total(splits) == static_cast<std::int64_t>(features.keys().size()),
                      "sharding.kjt_alltoall: the ranks get ", total(splits), " keys; there are ",
                      features.keys().size(), ".");
  const auto me = static_cast<std::size_t>(group.rank());
  const auto begin =
      features.keys().begin() + std::accumulate(splits.begin(), splits.begin() + group.rank(), 0LL);
  keys.assign(begin, begin + splits[me]);
  input_splits = features.dist_splits(splits);
}

std::vector<Sizes> KJTSplitsAllToAllMeta::lists() const {
  std::vector<Sizes> all = input_splits;
  if (!input.variable_stride_per_key()) {
    all.emplace_back(static_cast<std::size_t>(group.size()), input.stride());
  }
  return all;
}

Awaitable<std::vector<Sizes>> exchange_splits(const std::vector<Sizes>& lists, const Group& group) {
  const std::int64_t world = group.size();
  const auto count = static_cast<std::int64_t>(lists.size());
  for (const auto& list : lists) {
    TESSERA_CHECK_VALUE(static_cast<std::int64_t>(list.size()) == world,
                        "sharding.exchange_splits: a list has ", list.size(),
                        " numbers; the group has ", world, " ranks.");
  }
  // Rank by rank, so that each rank's column lies together.
  at::Tensor columns = at::empty({world, count}, at::kLong);
  auto* numbers = columns.data_ptr<std::int64_t>();
  for (std::int64_t r = 0; r < world; ++r) {
    for (std::int64_t k = 0; k < count; ++k) {
      numbers[r * count + k] = lists[static_cast<std::size_t>(k)][static_cast<std::size_t>(r)];
    }
  }
  const auto pending = exchange_numbers(columns, group);
  return Awaitable<std::vector<Sizes>>([pending, world, count] {
    const auto* numbers = pending.wait().const_data_ptr<std::int64_t>();
    std::vector<Sizes> received(static_cast<std::size_t>(count));
    for (std::int64_t k = 0; k < count; ++k) {
      for (std::int64_t r = 0; r < world; ++r) {
        received[static_cast<std::size_t>(k)].push_back(numbers[r * count + k]);
      }
    }
    return received;
  });
}

KJTAllToAllTensorsAwaitable exchange_tensors(const KJTSplitsAllToAllMeta& meta,
                                             const std::vector<Sizes>& received) {
  const bool is_variable = meta.input.variable_stride_per_key();
  const std::size_t num_tensors = meta.input_splits.size();
  TESSERA_CHECK_VALUE(received.size() == num_tensors + (is_variable ? 0 : 1),
                      "sharding.kjt_alltoall: ", received.size(), " lists of sizes for ",
                      num_tensors, " tensors.");
  const at::NoGradGuard no_grad;
  const int world = meta.group.size();
  std::vector<Awaitable<at::Tensor>> pending;
  const auto tensors = meta.input.dist_tensors();
  for (std::size_t t = 0; t < num_tensors; ++t) {
    pending.push_back(
        exchange_rows(tensors[t].detach(), meta.input_splits[t], meta.group, received[t]));
  }
  const Sizes strides = is_variable ? Sizes() : received.back();
  // The lengths come first and the values second, whatever else there is.
  const Sizes& output_splits = received[1];
  return KJTAllToAllTensorsAwaitable([meta, pending, strides, output_splits, is_variable, world] {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> arrived;
    arrived.reserve(pending.size());
    for (const auto& tensor : pending) arrived.push_back(tensor.wait());
    const at::Tensor recat =
        get_recat(static_cast<std::int64_t>(meta.keys.size()), world, meta.stagger, strides);
    KeyedJaggedTensor features = KeyedJaggedTensor::dist_init(
        meta.keys, arrived,
        {.variable_stride_per_key = is_variable,
         .num_workers = world,
         .recat = recat.defined() ? recat.to(meta.input.device()) : recat,
         .stride_per_rank = strides,
         .stagger = meta.stagger});
    return ReceivedFeatures{std::move(features), meta.input_splits[1], output_splits, strides,
                            recat};
  });
}

Awaitable<std::vector<KJTAllToAllTensorsAwaitable>> fused_kjt_alltoall(
    std::vector<KJTSplitsAllToAllMeta> metas) {
  TESSERA_CHECK_VALUE(!metas.empty(), "sharding.fused_kjt_alltoall: there is nothing to exchange.");
  std::vector<Sizes> lists;
  std::vector<std::size_t> counts;
  for (const auto& meta : metas) {
    TESSERA_CHECK_VALUE(meta.group == metas[0].group,
                        "sharding.fused_kjt_alltoall: the exchanges are of different groups.");
    const auto own = meta.lists();
    counts.push_back(own.size());
    lists.insert(lists.end(), own.begin(), own.end());
  }
  const auto splits = exchange_splits(lists, metas[0].group);
  return Awaitable<std::vector<KJTAllToAllTensorsAwaitable>>(
      [metas = std::move(metas), counts, splits] {
        const auto& all = splits.wait();
        std::vector<KJTAllToAllTensorsAwaitable> pending;
        auto next = all.begin();
        for (std::size_t m = 0; m < metas.size(); ++m) {
          const auto end = next + static_cast<std::ptrdiff_t>(counts[m]);
          pending.push_back(exchange_tensors(metas[m], std::vector<Sizes>(next, end)));
          next = end;
        }
        return pending;
      });
}

KJTAllToAll::KJTAllToAll(Group group, Sizes splits, int stagger)
    : group_(std::move(group)), splits_(std::move(splits)), stagger_(stagger) {
  TESSERA_CHECK_VALUE(static_cast<int>(splits_.size()) == group_.size(),
                      "sharding.kjt_alltoall: there are splits of ", splits_.size(),
                      " ranks; the group has ", group_.size(), ".");
  TESSERA_CHECK_VALUE(stagger_ > 0 && group_.size() % stagger_ == 0,
                      "sharding.kjt_alltoall: a stagger of ", stagger_, " does not divide ",
                      group_.size(), " ranks.");
}

KJTAllToAllSplitsAwaitable KJTAllToAll::forward(const KeyedJaggedTensor& features) const {
  const auto sent = fused_kjt_alltoall({{group_, features, splits_, stagger_}});
  return KJTAllToAllSplitsAwaitable([sent] { return sent.wait().front(); });
}

std::vector<KeyedJaggedTensor> kjt_one_to_all(const KeyedJaggedTensor& features,
                                              const Sizes& splits,
                                              const std::vector<at::Device>& devices) {
  TESSERA_CHECK_VALUE(splits.size() == devices.size(), "sharding.kjt_one_to_all: there are ",
                      splits.size(), " parts for ", devices.size(), " devices.");
  TESSERA_CHECK_VALUE(total(splits) == static_cast<std::int64_t>(features.keys().size()),
                      "sharding.kjt_one_to_all: the parts have ", total(splits),
                      " keys; there are ", features.keys().size(), ".");
  std::vector<KeyedJaggedTensor> parts = features.split(splits);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].device() != devices[i]) parts[i] = parts[i].to(devices[i], true);
  }
  return parts;
}

Awaitable<at::Tensor> pooled_embeddings_alltoall(const at::Tensor& rows,
                                                 const Sizes& dim_sum_per_rank, const Group& group,
                                                 const Sizes& batch_size_per_rank,
                                                 const Codecs& codecs) {
  if (!batch_size_per_rank.empty()) {
    return alltoall_pooled(rows, batch_size_per_rank, dim_sum_per_rank, group, codecs);
  }
  TESSERA_CHECK_VALUE(
      rows.size(0) % group.size() == 0, "sharding.pooled_embeddings_alltoall: ", rows.size(0),
      " rows cannot be divided among ", group.size(), " ranks. Give the batch size of each rank.");
  return alltoall_pooled(rows,
                         Sizes(static_cast<std::size_t>(group.size()), rows.size(0) / group.size()),
                         dim_sum_per_rank, group, codecs);
}

Awaitable<at::Tensor> pooled_embeddings_reduce_scatter(const at::Tensor& rows, const Group& group,
                                                       const Sizes& input_splits,
                                                       const Codecs& codecs) {
  return input_splits.empty() ? reduce_scatter_base_pooled(rows, group, codecs)
                              : reduce_scatter_v_pooled(rows, input_splits, group, codecs);
}

Awaitable<at::Tensor> sequence_embeddings_alltoall(
    const at::Tensor& rows, const at::Tensor& lengths, const Sizes& input_splits,
    const Sizes& output_splits, const Sizes& features_per_rank, const Group& group,
    const SequenceOptions& options, const Codecs& codecs) {
  TESSERA_CHECK_VALUE(static_cast<int>(features_per_rank.size()) == group.size(),
                      "sharding.sequence_embeddings_alltoall: there are features of ",
                      features_per_rank.size(), " ranks; the group has ", group.size(), ".");
  const std::int64_t features = features_per_rank[static_cast<std::size_t>(group.rank())];
  // The order of segments, [rank][feature] on the way and [feature][rank] here; and back.
  at::Tensor forward_recat;
  at::Tensor backward_recat;
  if (features > 0 && lengths.numel() > 0) {
    const at::Tensor known = options.sparse_features_recat;
    backward_recat = known.defined() ? known.to(at::kLong)
                                     : get_recat(features, group.size(), /*stagger=*/1,
                                                 options.batch_size_per_rank)
                                           .to(rows.device());
    forward_recat = at::empty_like(backward_recat)
                        .scatter(0, backward_recat,
                                 at::arange(backward_recat.numel(), backward_recat.options()));
  }
  Awaitable<at::Tensor> pending = alltoall_sequence(rows, forward_recat, backward_recat, lengths,
                                                    input_splits, output_splits, group, codecs);
  if (options.unbucketize_permute.defined()) {
    pending.add_callback([permute = options.unbucketize_permute](const at::Tensor& sent) {
      return sent.index_select(0, permute);
    });
  }
  return pending;
}

at::Tensor embeddings_all_to_one(const std::vector<at::Tensor>& parts, at::Device device,
                                 std::int64_t cat_dim) {
  TESSERA_CHECK_VALUE(!parts.empty(), "sharding.embeddings_all_to_one: there are no parts.");
  // One copy over the bus instead of many: put together beside the first part, then moved.
  const at::Device meeting = device.is_cpu() && !parts[0].is_cpu() ? parts[0].device() : device;
  std::vector<at::Tensor> moved;
  for (const auto& part : parts) moved.push_back(part.to(meeting, part.scalar_type()));
  return at::cat(moved, cat_dim).to(device, parts[0].scalar_type());
}

at::Tensor embeddings_all_to_one_reduce(const std::vector<at::Tensor>& parts, at::Device device) {
  TESSERA_CHECK_VALUE(!parts.empty(), "sharding.embeddings_all_to_one_reduce: there are no parts.");
  at::Tensor sum = parts[0].to(device, parts[0].scalar_type());
  for (std::size_t i = 1; i < parts.size(); ++i) {
    sum = sum + parts[i].to(device, parts[i].scalar_type());
  }
  return sum;
}

}  // namespace tessera::sharding
