#include "sharding/arrange.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <tuple>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "core/kept_memory.h"
#include "kernels/id_lines.h"
#include "kernels/row_cut.h"

namespace tessera::sharding {

using jagged::KeyedJaggedTensor;

namespace {

template <typename Id>
std::vector<Id> buckets_of(const Id* ids, std::int64_t count) {
  std::vector<Id> buckets(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    buckets[i] = static_cast<Id>(kernels::bucket_of_hash(kernels::hash_id(ids[i])));
  }
  return buckets;
}

}  // namespace

Arrangement::Arrangement(const TableLayout& layout)
    : num_ranks_(layout.routes.size()), cuts_by_hash_(layout.cuts_by_hash) {
  std::map<std::tuple<std::size_t, std::size_t, std::int64_t>, std::size_t> known;
  struct Part {
    std::int64_t row;
    std::int64_t rows;
    std::size_t segment;
  };
  std::vector<std::vector<Part>> parts;
  for (std::size_t rank = 0; rank < layout.routes.size(); ++rank) {
    for (const Route& route : layout.routes[rank]) {
      const bool is_cut = layout.is_row_cut(route.table);
      const Shard& shard = layout.shard(route);
      if (is_cut) {
        const auto [found, is_new] =
            known.emplace(std::tuple(route.table, route.feature, shard.column), cuts_.size());
        if (is_new) {
          cuts_.push_back({route.feature, {}, {}});
          parts.emplace_back();
        }
        parts[found->second].push_back({shard.row, shard.rows, segments_.size()});
      }
      segments_.push_back({route.feature, rank, is_cut});
    }
  }
  for (std::size_t c = 0; c < cuts_.size(); ++c) {
    std::sort(parts[c].begin(), parts[c].end(), [](const Part& a, const Part& b) {
      return std::pair(a.row, a.rows) < std::pair(b.row, b.rows);
    });
    for (const Part& part : parts[c]) {
      cuts_[c].starts.push_back(part.row);
      cuts_[c].segments.push_back(part.segment);
    }
    cuts_[c].starts.push_back(parts[c].back().row + parts[c].back().rows);
  }
}

bool Arrangement::is_identity(const KeyedJaggedTensor& features,
                              const std::vector<std::size_t>& places) const {
  if (!cuts_.empty() || segments_.size() != features.keys().size()) return false;
  for (std::size_t s = 0; s < segments_.size(); ++s) {
    if (places[segments_[s].feature] != s) return false;
  }
  return true;
}

template <typename Id, typename Length>
void Arrangement::fill(const KeyedJaggedTensor& features, const std::vector<std::size_t>& places,
                       const at::Tensor& weights, ArrangedIds& result) const {
  const at::Tensor all_ids = features.values().contiguous();
  const at::Tensor all_lengths = features.lengths().contiguous();
  const auto* ids = all_ids.const_data_ptr<Id>();
  const auto* lengths = all_lengths.const_data_ptr<Length>();
  const auto& first_bag = features.lengths_offset_per_key();
  const auto& first_id = features.offset_per_key();
  const auto num_bags = [&](std::size_t key) { return first_bag[key + 1] - first_bag[key]; };

  // Lengths first: they say where the ids go.
  std::vector<std::int64_t> bag_place(segments_.size() + 1, 0);
  for (std::size_t s = 0; s < segments_.size(); ++s) {
    bag_place[s + 1] = bag_place[s] + num_bags(places[segments_[s].feature]);
  }
  result.lengths = at::zeros({bag_place.back()}, at::kInt);
  auto* sent_lengths = result.lengths.data_ptr<std::int32_t>();
  for (std::size_t s = 0; s < segments_.size(); ++s) {
    if (segments_[s].is_cut) continue;
    const std::size_t key = places[segments_[s].feature];
    std::copy(lengths + first_bag[key], lengths + first_bag[key + 1], sent_lengths + bag_place[s]);
  }
  // What decides about the part of an id: the id, or its bucket.
  std::vector<std::vector<Id>> buckets(cuts_by_hash_ ? cuts_.size() : 0);
  for (std::size_t c = 0; c < buckets.size(); ++c) {
    const std::size_t key = places[cuts_[c].feature];
    buckets[c] = buckets_of(ids + first_id[key], first_id[key + 1] - first_id[key]);
  }
  const auto cut_of = [&](std::size_t c) {
    const Cut& cut = cuts_[c];
    const std::size_t key = places[cut.feature];
    return kernels::RowCut<Id>{cuts_by_hash_ ? buckets[c].data() : ids + first_id[key],
                               first_id[key + 1] - first_id[key], cut.starts.data(),
                               static_cast<std::int64_t>(cut.segments.size())};
  };
  for (std::size_t c = 0; c < cuts_.size(); ++c) {
    const std::size_t key = places[cuts_[c].feature];
    std::vector<std::int32_t*> parts;
    for (const std::size_t s : cuts_[c].segments) parts.push_back(sent_lengths + bag_place[s]);
    kernels::count_parts(cut_of(c), lengths + first_bag[key], num_bags(key), parts.data());
  }

  std::vector<std::int64_t> id_place(segments_.size() + 1, 0);
  for (std::size_t s = 0; s < segments_.size(); ++s) {
    const std::size_t key = places[segments_[s].feature];
    const std::int64_t count =
        segments_[s].is_cut ? std::accumulate(sent_lengths + bag_place[s],
                                              sent_lengths + bag_place[s + 1], std::int64_t{0})
                            : first_id[key + 1] - first_id[key];
    id_place[s + 1] = id_place[s] + count;
    result.values_per_rank[segments_[s].rank] += count;
    result.lengths_per_rank[segments_[s].rank] += bag_place[s + 1] - bag_place[s];
  }
  const std::int64_t total = id_place.back();
  result.values = core::empty_kept({total}, all_ids.options());
  auto* sent_ids = result.values.data_ptr<Id>();
  const bool has_source = result.source.defined();
  if (has_source) result.source = at::empty({total}, at::kLong);
  if (weights.defined()) result.weights = at::empty({total}, at::kFloat);
  for (std::size_t s = 0; s < segments_.size(); ++s) {
    if (segments_[s].is_cut) continue;
    const std::int64_t first = first_id[places[segments_[s].feature]];
    const std::int64_t count = id_place[s + 1] - id_place[s];
    std::copy_n(ids + first, count, sent_ids + id_place[s]);
    if (weights.defined()) {
      std::copy_n(weights.const_data_ptr<float>() + first, count,
                  result.weights.data_ptr<float>() + id_place[s]);
    }
    if (has_source) {
      auto* source = result.source.data_ptr<std::int64_t>() + id_place[s];
      std::iota(source, source + count, first);
    }
  }
  for (std::size_t c = 0; c < cuts_.size(); ++c) {
    const Cut& cut = cuts_[c];
    std::vector<std::int64_t> cursor;
    for (const std::size_t s : cut.segments) cursor.push_back(id_place[s]);
    kernels::RowCutExtras extras;
    extras.first_source = first_id[places[cut.feature]];
    if (weights.defined()) {
      extras.weights = weights.const_data_ptr<float>() + extras.first_source;
      extras.weights_out = result.weights.data_ptr<float>();
    }
    if (has_source) extras.source = result.source.data_ptr<std::int64_t>();
    kernels::fill_parts(cut_of(c), extras, cursor.data(), sent_ids);
    if (!cuts_by_hash_) continue;
    const auto* source = result.source.const_data_ptr<std::int64_t>();
    for (const std::size_t s : cut.segments) {
      for (std::int64_t i = id_place[s]; i < id_place[s + 1]; ++i) sent_ids[i] = ids[source[i]];
    }
  }
}

// The same of whole tensors, for devices without kernels.
void Arrangement::compose(const KeyedJaggedTensor& features, const std::vector<std::size_t>& places,
                          bool is_weighted, bool needs_source, ArrangedIds& result) const {
  const auto& first_bag = features.lengths_offset_per_key();
  const auto& first_id = features.offset_per_key();
  const at::Tensor all_lengths = features.lengths().reshape({-1});
  struct Piece {
    at::Tensor lengths, values, source;
  };
  std::vector<Piece> pieces(segments_.size());
  const auto options = at::TensorOptions(at::kLong).device(features.device());
  const auto whole = [&](std::size_t feature) {
    const std::size_t key = places[feature];
    const std::int64_t count = first_id[key + 1] - first_id[key];
    return Piece{all_lengths.narrow(0, first_bag[key], first_bag[key + 1] - first_bag[key]),
                 features.values().narrow(0, first_id[key], count),
                 at::arange(first_id[key], first_id[key + 1], options)};
  };
  for (std::size_t s = 0; s < segments_.size(); ++s) {
    if (!segments_[s].is_cut) pieces[s] = whole(segments_[s].feature);
  }
  for (const Cut& cut : cuts_) {
    const Piece all = whole(cut.feature);
    const at::Tensor ids =
        at::where(all.values.lt(0).logical_or(all.values.ge(cut.starts.back())), 0, all.values);
    const std::int64_t bags = all.lengths.numel();
    const at::Tensor bag_of = at::arange(bags, options).repeat_interleave(all.lengths);
    for (std::size_t p = 0; p < cut.segments.size(); ++p) {
      const at::Tensor chosen =
          ids.ge(cut.starts[p]).logical_and(ids.lt(cut.starts[p + 1])).nonzero().squeeze(1);
      pieces[cut.segments[p]] = {at::bincount(bag_of.index_select(0, chosen), {}, bags),
                                 ids.index_select(0, chosen) - cut.starts[p],
                                 all.source.index_select(0, chosen)};
    }
  }
  std::vector<at::Tensor> lengths;
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> sources;
  for (std::size_t s = 0; s < segments_.size(); ++s) {
    lengths.push_back(pieces[s].lengths.to(at::kInt));
    values.push_back(pieces[s].values);
    sources.push_back(pieces[s].source);
    result.values_per_rank[segments_[s].rank] += pieces[s].values.numel();
    result.lengths_per_rank[segments_[s].rank] += pieces[s].lengths.numel();
  }
  if (segments_.empty()) return;
  result.lengths = at::cat(lengths);
  result.values = at::cat(values);
  const at::Tensor source = at::cat(sources);
  if (is_weighted) result.weights = features.weights().to(at::kFloat).index_select(0, source);
  if (needs_source) result.source = source;
}

ArrangedIds Arrangement::arrange(const KeyedJaggedTensor& features,
                                 const std::vector<std::size_t>& places, bool is_weighted,
                                 bool needs_source) const {
  const at::NoGradGuard no_grad;
  ArrangedIds result;
  result.values_per_rank.assign(num_ranks_, 0);
  result.lengths_per_rank.assign(num_ranks_, 0);
  if (is_identity(features, places)) {
    result.lengths = features.lengths().reshape({-1}).to(at::kInt).contiguous();
    result.values = features.values().contiguous();
    if (is_weighted) result.weights = features.weights().detach().to(at::kFloat).contiguous();
    for (std::size_t s = 0; s < segments_.size(); ++s) {
      result.values_per_rank[segments_[s].rank] += features.length_per_key()[s];
      result.lengths_per_rank[segments_[s].rank] += features.stride_per_key()[s];
    }
    return result;
  }
  if (segments_.empty()) {
    const auto options = at::TensorOptions().device(features.device());
    result.lengths = at::empty({0}, options.dtype(at::kInt));
    result.values = at::empty({0}, features.values().options());
    if (is_weighted) result.weights = at::empty({0}, options.dtype(at::kFloat));
    if (needs_source) result.source = at::empty({0}, options.dtype(at::kLong));
    return result;
  }
  if (!features.values().is_cpu()) {
    compose(features, places, is_weighted, needs_source, result);
    return result;
  }
  if (needs_source) result.source = at::empty({0}, at::kLong);
  const at::Tensor weights =
      is_weighted ? features.weights().detach().to(at::kFloat).contiguous() : at::Tensor();
  const bool is_short = features.values().scalar_type() == at::kInt;
  const bool has_short_lengths = features.lengths().scalar_type() == at::kInt;
  if (is_short) {
    has_short_lengths ? fill<std::int32_t, std::int32_t>(features, places, weights, result)
                      : fill<std::int32_t, std::int64_t>(features, places, weights, result);
  } else {
    has_short_lengths ? fill<std::int64_t, std::int32_t>(features, places, weights, result)
                      : fill<std::int64_t, std::int64_t>(features, places, weights, result);
  }
  return result;
}

}  // namespace tessera::sharding
