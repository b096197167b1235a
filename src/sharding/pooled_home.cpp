#include "sharding/pooled_home.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include <ATen/Functions.h>

#include "comm/lending.h"
#include "core/kept_memory.h"

namespace tessera::sharding {
namespace {

// Rows that are lent: those of rank 0 are the first source, as if they were all; those of the
// others come behind the other kinds.
constexpr std::size_t kNumSources = 4;
std::size_t source_of_rank(std::size_t rank) { return rank == 0 ? 0 : kNumSources - 1 + rank; }

comm::Awaitable<Exchange::Parts> in_one_part(const comm::Awaitable<at::Tensor>& pending) {
  return comm::Awaitable<Exchange::Parts>([pending] { return Exchange::Parts{pending.wait()}; });
}

}  // namespace

PooledHome::PooledHome(std::shared_ptr<const TableLayout> layout, const comm::Group& group,
                       PooledHomeOptions options)
    : layout_(std::move(layout)),
      group_(group),
      options_(std::move(options)),
      blocks_(kNumSources) {
  for (const Output& output : layout_->outputs) {
    names_.push_back(output.name);
    dims_.push_back(output.columns);
  }
  find_homes();
  lends_ = layout_->has_routes && keeps_own_rows() && comm::can_lend(group_);
  if (layout_->has_hosted) hosts_.emplace(group_, layout_->topology.local_size);
}

embedding::RowMemory PooledHome::row_memory() const {
  if (!lends_) return {};
  return [group = group_](std::int64_t size) { return comm::lendable(size, at::kFloat, group); };
}

jagged::KeyedTensor PooledHome::arrive(const DistContext& context, const Homeward& pending,
                                       const at::Tensor& stepped, const at::Tensor& dense,
                                       std::shared_ptr<const void> owner) const {
  CombinePlan plan = combine_plan(context);
  plan.owner = std::move(owner);  // backward hands gradients to its tables
  const Exchange::Parts& direct = pending.direct.wait();
  std::vector<at::Tensor> sources{direct[0], stepped, dense, pending.hosted.wait()};
  sources.insert(sources.end(), direct.begin() + 1, direct.end());
  return {names_, dims_, combine(std::move(plan), sources)};
}

void PooledHome::find_homes() {
  std::vector<std::int64_t> begins;
  for (const std::int64_t dim : dims_) {
    begins.push_back(num_columns_);
    num_columns_ += dim;
  }
  // Output, column and row decide the order in which blocks are put down and summed.
  std::vector<std::pair<std::tuple<std::size_t, std::int64_t, std::int64_t>, Home>> found;
  const auto add = [&](std::size_t source, const Route& route, std::size_t rank = 0) {
    const Shard& shard = layout_->shard(route);
    Home home;
    home.source = source;
    home.place = blocks_[source].size();
    home.rank = rank;
    home.feature = route.feature;
    home.columns = shard.columns;
    home.column = begins[route.output] + shard.column;
    home.is_divided = (options_.sends_sums || layout_->is_row_cut(route.table)) &&
                      layout_->tables[route.table].pooling == embedding::PoolingType::kMean;
    blocks_[source].push_back({shard.columns, route.feature, rank});
    found.push_back({{route.output, shard.column, shard.row}, home});
  };
  for (std::size_t rank = 0; rank < layout_->routes.size(); ++rank) {
    for (const Route& route : layout_->routes[rank]) {
      if (!layout_->is_hosted(route.table)) add(0, route, rank);
    }
  }
  // The ranks of a host have the same hosted routes; their rows come as one sum.
  const auto local_size = static_cast<std::size_t>(layout_->topology.local_size);
  for (std::size_t first = 0; first < layout_->routes.size(); first += local_size) {
    for (const Route& route : layout_->routes[first]) {
      if (layout_->is_hosted(route.table)) add(3, route);
    }
  }
  for (const std::size_t r : options_.stepped_routes) add(1, layout_->local[r]);
  for (const std::size_t r : options_.dense_routes) add(2, layout_->local[r]);
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (std::size_t i = 0; i < found.size(); ++i) {
    found[i].second.is_added = i > 0 && found[i].second.column == found[i - 1].second.column;
    homes_.push_back(found[i].second);
  }
}

std::int64_t PooledHome::direct_size(const DistContext& context, std::size_t rank) const {
  std::int64_t size = 0;
  for (const Route& route : layout_->routes[rank]) {
    if (layout_->is_hosted(route.table)) continue;
    size += context.strides[route.feature] * layout_->shard(route).columns;
  }
  return size;
}

std::int64_t PooledHome::hosted_size(const DistContext& context, std::size_t host) const {
  std::int64_t size = 0;
  for (const Route& route :
       layout_->routes[host * static_cast<std::size_t>(layout_->topology.local_size)]) {
    if (!layout_->is_hosted(route.table)) continue;
    size += context.strides[route.feature] * layout_->shard(route).columns;
  }
  return size;
}

bool PooledHome::keeps_own_rows() const {
  // One rank sends nothing, and what a codec rounds is rounded at home too.
  const auto& codecs = options_.codecs;
  return group_.size() > 1 && !layout_->has_hosted && options_.device.is_cpu() &&
         codecs.forward.is_identity() && codecs.backward.is_identity();
}

embedding::FeatureRange PooledHome::own_rows() const {
  if (!keeps_own_rows()) return {};
  const auto rank = static_cast<std::size_t>(group_.rank());
  const auto num_routes = static_cast<std::int64_t>(layout_->routes[rank].size());
  return {group_.rank() * num_routes, (group_.rank() + 1) * num_routes};
}

Homeward PooledHome::send(const DistContext& context,
                          const embedding::PreparedRows& looked_up) const {
  const at::Tensor& rows = looked_up.rows;
  const auto& own = layout_->routes[static_cast<std::size_t>(group_.rank())];
  const std::size_t world = layout_->routes.size();
  // The rows for a rank lie together, those of hosted tables last.
  Sizes direct(world, 0);
  Sizes hosted(world, 0);
  Sizes received;
  for (std::size_t r = 0; r < world; ++r) {
    for (std::size_t k = 0; k < own.size(); ++k) {
      (layout_->is_hosted(own[k].table) ? hosted : direct)[r] +=
          context.batches[r][k] * layout_->shard(own[k]).columns;
    }
    received.push_back(direct_size(context, r));
  }
  const auto exchange = [&](const at::Tensor& values, const Sizes& sent, const Sizes& arriving,
                            const comm::Group& over) {
    // While rows and gradients travel, backward's part that needs neither is done.
    return exchange_flat(values, sent, arriving, over, options_.codecs, gradient_factor(over),
                         looked_up.prepare, {looked_up.look_up_later, unread_});
  };
  const comm::NoWait<at::Tensor> nothing(at::empty({0}, rows.options().requires_grad(false)));
  if (!layout_->has_routes) return {in_one_part(nothing), nothing};
  if (lends_) {
    return {lend_rows(rows, direct, received, group_, gradient_factor(group_), looked_up.prepare,
                      {looked_up.look_up_later, unread_}),
            nothing};
  }
  if (!layout_->has_hosted) return {in_one_part(exchange(rows, direct, received, group_)), nothing};
  std::vector<at::Tensor> direct_rows;
  std::vector<std::vector<at::Tensor>> by_local_rank(
      static_cast<std::size_t>(layout_->topology.local_size));
  Sizes sums(by_local_rank.size(), 0);
  Sizes across;
  std::int64_t begin = 0;
  for (std::size_t r = 0; r < world; ++r) {
    const std::size_t local_rank = r % by_local_rank.size();
    direct_rows.push_back(rows.narrow(0, begin, direct[r]));
    by_local_rank[local_rank].push_back(rows.narrow(0, begin + direct[r], hosted[r]));
    begin += direct[r] + hosted[r];
    sums[local_rank] += hosted[r];
    if (local_rank == static_cast<std::size_t>(hosts_->intra.rank())) across.push_back(hosted[r]);
  }
  std::vector<at::Tensor> hosted_rows;
  for (const auto& parts : by_local_rank) {
    hosted_rows.insert(hosted_rows.end(), parts.begin(), parts.end());
  }
  const Request summed =
      reduce_scatter_v_pooled(at::cat(hosted_rows), sums, hosts_->intra, options_.codecs);
  const auto pending = exchange(at::cat(direct_rows), direct, received, group_);
  Sizes arriving;
  for (std::size_t host = 0; host < world / by_local_rank.size(); ++host) {
    arriving.push_back(hosted_size(context, host));
  }
  return {in_one_part(pending), exchange(summed.wait(), across, arriving, hosts_->cross)};
}

CombinePlan PooledHome::combine_plan(const DistContext& context) const {
  CombinePlan plan;
  plan.rows = context.features.stride();
  plan.columns = num_columns_;
  plan.factors.resize(layout_->features.size());
  plan.inverse.resize(layout_->features.size());
  std::vector<std::vector<std::int64_t>> begins(blocks_.size());
  for (std::size_t source = 0; source < blocks_.size(); ++source) {
    std::int64_t begin = 0;
    std::size_t rank = 0;
    for (const RowsOfFeature& block : blocks_[source]) {
      if (lends_ && block.rank != rank) begin = 0;  // a tensor of its own
      rank = block.rank;
      begins[source].push_back(begin);
      begin += block.columns * context.strides[block.feature];
    }
  }
  if (lends_) {
    plan.gradient_memory = [group = group_](std::size_t source, std::int64_t size) {
      const auto own = source_of_rank(static_cast<std::size_t>(group.rank()));
      const bool stays = source == own || (source > 0 && source < kNumSources);
      return stays ? core::empty_kept({size}, at::kFloat) : comm::lendable(size, at::kFloat, group);
    };
  }
  for (const Home& home : homes_) {
    const std::size_t source = lends_ && home.source == 0 ? source_of_rank(home.rank) : home.source;
    plan.pieces.push_back({source, begins[home.source][home.place], context.strides[home.feature],
                           home.columns, home.column, home.feature, home.is_added,
                           home.is_divided});
    at::Tensor& factor = plan.factors[home.feature];
    if (home.is_divided && !factor.defined()) {
      factor = context.features.feature(context.places[home.feature])
                   .lengths()
                   .to(at::kFloat)
                   .clamp_min(1)
                   .reciprocal();
    }
  }
  const auto& inverse = context.features.inverse_indices_or_none();
  for (std::size_t f = 0; inverse && f < layout_->features.size(); ++f) {
    const auto& known = inverse->first;
    const auto found = std::find(known.rbegin(), known.rend(), layout_->features[f]);
    plan.inverse[f] = inverse->second[known.rend() - found - 1].to(at::kLong).contiguous();
  }
  return plan;
}

}  // namespace tessera::sharding
