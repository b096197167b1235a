#include "sharding/local_tables.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "comm/engines.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"

namespace tessera::sharding {
namespace {

using embedding::BoundsCheckMode;
using embedding::Feature;
using embedding::GradientForm;
using embedding::PoolingType;
using embedding::RowGradient;
using embedding::RowOptimizer;
using embedding::Table;
using embedding::TableBatch;
using embedding::TableBatchOptions;

at::Tensor sparse_of(const RowGradient& gradient, const at::Tensor& weight) {
  return at::_sparse_coo_tensor_unsafe(
      gradient.rows.unsqueeze(0), gradient.values.to(weight.scalar_type()), weight.sizes(),
      weight.options().layout(at::kSparse).requires_grad(false), /*is_coalesced=*/true);
}

void add_gradient(at::Tensor weight, const at::Tensor& gradient) {
  at::Tensor& own = weight.mutable_grad();
  own = own.defined() ? own + gradient : gradient;
}

}  // namespace

LocalTables::LocalTables(std::shared_ptr<const TableLayout> layout, const comm::Group& group,
                         const LocalTablesOptions& options)
    : layout_(std::move(layout)), group_(group), options_(options) {
  embedding::check_options(layout_->operation, options_.optimizer);
  TESSERA_CHECK_VALUE(!is_exact() || !options_.optimizer.stochastic_rounding, layout_->operation,
                      ": rows that are cut cannot have exact norms and be rounded at random.");
  check_host_rows();
  make_shards();
  make_routed();
  make_local();
  make_row_norms();
}

void LocalTables::make_row_norms() {
  if (!is_exact()) return;
  std::vector<std::pair<std::size_t, std::size_t>> places;
  for (std::size_t i = 0; i < routed_receiver_.shards.size(); ++i) {
    if (routed_receiver_.is_dense[i]) continue;
    const std::size_t shard = routed_receiver_.shards[i];
    places.emplace_back(table_of_shard_[shard], number_of(shard));
  }
  row_norms_ = std::make_unique<RowNorms>(*layout_, group_, std::move(places));
}

bool LocalTables::is_exact() const {
  return options_.exact_row_norms && options_.gradients != GradientForm::kDense &&
         embedding::reads_row_norms(options_.optimizer.kind) && RowNorms::has_cut_columns(*layout_);
}

std::size_t LocalTables::number_of(std::size_t shard) const {
  const auto& all = layout_->sharding(table_of_shard_[shard]).shards;
  return static_cast<std::size_t>(std::find(all.begin(), all.end(), shards_[shard].place) -
                                  all.begin());
}

void LocalTables::make_shards() {
  for (std::size_t t = 0; t < layout_->tables.size(); ++t) {
    const auto& table = layout_->tables[t];
    std::size_t number = 0;
    for (const Shard& shard : layout_->sharding(t).shards) {
      if (shard.rank != group_.rank()) continue;
      LocalShard own;
      own.table = table.name;
      own.name = number == 0 ? table.name : table.name + "#" + std::to_string(number);
      own.place = shard;
      own.table_rows = table.num_embeddings;
      own.table_columns = table.embedding_dim;
      const auto make = is_on_host(t) ? embedding::mapped_rows : embedding::empty_rows;
      own.weight =
          make(shard.rows, shard.columns, embedding::scalar_type(table.data_type), options_.device);
      embedding::initialize(table, own.weight);
      if (is_local(layout_->sharding(t)) && group_.size() > 1) {
        comm::broadcast_(own.weight, 0, group_);
      }
      own.weight.requires_grad_(true);
      shards_.push_back(std::move(own));
      table_of_shard_.push_back(t);
      ++number;
    }
  }
}

void LocalTables::check_host_rows() const {
  for (const auto& [name, share] : options_.host_rows) {
    const auto found =
        std::find_if(layout_->tables.begin(), layout_->tables.end(),
                     [&, &name = name](const auto& table) { return table.name == name; });
    TESSERA_CHECK_VALUE(found != layout_->tables.end(), layout_->operation, ": host_rows name '",
                        name, "', which is no table.");
    TESSERA_CHECK_VALUE(share >= 0 && share <= 1, layout_->operation, ": table '", name,
                        "' has a cache for ", share, " of its rows; it may be 0 to 1.");
    const ParameterSharding& sharding =
        layout_->sharding(static_cast<std::size_t>(found - layout_->tables.begin()));
    const bool is_stepped = sharding.kernel == ComputeKernel::kFused && !is_local(sharding) &&
                            options_.gradients == GradientForm::kFused && !is_exact();
    TESSERA_CHECK_VALUE(share == 0 || is_stepped, layout_->operation, ": table '", name,
                        "' has a cache, and its rows are not stepped in backward where they lie. "
                        "Use the kernel 'fused', fused gradients, and no data parallelism.");
  }
}

bool LocalTables::is_on_host(std::size_t table) const {
  return options_.device.is_cuda() && options_.host_rows.contains(layout_->tables[table].name);
}

Table LocalTables::table_of(std::size_t shard) const {
  const std::size_t table = table_of_shard_[shard];
  Table own{shards_[shard].name, shards_[shard].weight,
            layout_->is_row_cut(table) ? PoolingType::kSum : layout_->tables[table].pooling};
  if (is_on_host(table)) {
    const double share = options_.host_rows.at(layout_->tables[table].name);
    own.cached_rows = static_cast<std::int64_t>(
        std::ceil(share * static_cast<double>(shards_[shard].place.rows)));
  }
  return own;
}

void LocalTables::write_back() const {
  if (routed_) routed_->write_back();
}

std::shared_ptr<RowOptimizer> LocalTables::make_optimizer(const Receiver& receiver) const {
  std::vector<std::pair<std::string, at::Tensor>> weights;
  for (std::size_t i = 0; i < receiver.shards.size(); ++i) {
    const LocalShard& shard = shards_[receiver.shards[i]];
    if (!receiver.is_dense[i]) weights.emplace_back(shard.name, shard.weight);
  }
  if (weights.empty()) return nullptr;
  return std::make_shared<RowOptimizer>(std::move(weights), options_.optimizer);
}

void LocalTables::make_routed() {
  std::vector<Table> tables;
  std::map<std::pair<std::size_t, std::size_t>, std::int64_t> table_number;  // by table and shard
  Receiver& receiver = routed_receiver_;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const std::size_t t = table_of_shard_[i];
    const ParameterSharding& sharding = layout_->sharding(t);
    if (is_local(sharding)) continue;
    if (shards_[i].place.rows == 0 && !layout_->is_hosted(t)) continue;
    table_number[{t, number_of(i)}] = static_cast<std::int64_t>(tables.size());
    tables.push_back(table_of(i));
    receiver.shards.push_back(i);
    receiver.is_dense.push_back(sharding.kernel == ComputeKernel::kDense ||
                                options_.gradients == GradientForm::kDense);
    if (!receiver.is_dense.back()) receiver.columns.push_back(shards_[i].table_columns);
  }
  if (tables.empty()) return;
  std::vector<Feature> features;
  for (int source = 0; source < group_.size(); ++source) {
    for (const Route& route : layout_->routes[static_cast<std::size_t>(group_.rank())]) {
      features.push_back(
          {layout_->features[route.feature], table_number.at({route.table, route.shard})});
    }
  }
  TableBatchOptions options;
  options.bounds_check = BoundsCheckMode::kIgnore;  // ids were checked where they came from
  const bool is_fused = options_.gradients == GradientForm::kFused && !is_exact() &&
                        std::none_of(receiver.is_dense.begin(), receiver.is_dense.end(),
                                     [](bool is_dense) { return is_dense; });
  for (Table& table : tables) {
    TESSERA_CHECK_VALUE(table.cached_rows == 0 || is_fused, layout_->operation, ": table '",
                        table.name,
                        "' has a cache, and other tables of this rank have dense gradients. Put "
                        "those into a collection of their own.");
  }
  if (is_fused) {
    options.gradients = GradientForm::kFused;
    options.optimizer = options_.optimizer;
    options.cache_policy = options_.cache_policy;
    routed_ = std::make_unique<TableBatch>(std::move(tables), std::move(features), options);
    receiver.optimizer = routed_->optimizer();
    return;
  }
  receiver.optimizer = make_optimizer(receiver);
  options.gradients = GradientForm::kSparse;
  options.sink = [this](std::vector<RowGradient> gradients) {
    take(routed_receiver_, std::move(gradients));
  };
  routed_ = std::make_unique<TableBatch>(std::move(tables), std::move(features), options);
}

void LocalTables::make_local() {
  struct Part {
    std::vector<Table> tables;
    std::vector<Feature> features;
    std::map<std::size_t, std::int64_t> number_of;
  };
  Part stepped;
  Part dense;
  for (std::size_t r = 0; r < layout_->local.size(); ++r) {
    const Route& route = layout_->local[r];
    const bool is_dense = layout_->sharding(route.table).kernel == ComputeKernel::kDense ||
                          options_.gradients == GradientForm::kDense;
    Part& part = is_dense ? dense : stepped;
    const auto [found, is_new] =
        part.number_of.emplace(route.table, static_cast<std::int64_t>(part.tables.size()));
    if (is_new) {
      const auto shard = static_cast<std::size_t>(
          std::find(table_of_shard_.begin(), table_of_shard_.end(), route.table) -
          table_of_shard_.begin());
      part.tables.push_back(table_of(shard));
      if (!is_dense) {
        local_receiver_.shards.push_back(shard);
        local_receiver_.is_dense.push_back(false);
      }
    }
    part.features.push_back({layout_->features[route.feature], found->second});
    (is_dense ? dense_routes_ : stepped_routes_).push_back(r);
  }
  TableBatchOptions options;
  options.bounds_check = BoundsCheckMode::kIgnore;
  if (!dense.tables.empty()) {
    options.gradients = GradientForm::kDense;
    local_dense_ = std::make_unique<TableBatch>(dense.tables, dense.features, options);
  }
  if (!stepped.tables.empty()) {
    local_receiver_.optimizer = make_optimizer(local_receiver_);
    options.gradients = GradientForm::kSparse;
    options.sink = [this](std::vector<RowGradient> gradients) { take_local(std::move(gradients)); };
    local_stepped_ = std::make_unique<TableBatch>(stepped.tables, stepped.features, options);
  }
}

void LocalTables::take(const Receiver& receiver, std::vector<RowGradient> gradients) {
  const at::NoGradGuard no_grad;
  std::vector<RowGradient> steps;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor& weight = shards_[receiver.shards[i]].weight;
    if (receiver.is_dense[i]) {
      const at::Tensor dense =
          at::zeros(weight.sizes(), weight.options().requires_grad(false))
              .index_copy_(0, gradients[i].rows, gradients[i].values.to(weight.scalar_type()));
      add_gradient(weight, dense);
    } else if (options_.gradients == GradientForm::kSparse) {
      add_gradient(weight, sparse_of(gradients[i], weight));
    } else {
      steps.push_back(std::move(gradients[i]));
    }
  }
  if (!steps.empty()) step_rows(receiver, steps);
}

void LocalTables::step_rows(const Receiver& receiver, const std::vector<RowGradient>& gradients) {
  if (row_norms_ == nullptr || &receiver != &routed_receiver_) {
    return receiver.optimizer->step_rows(gradients);
  }
  receiver.optimizer->step_cut_rows(
      gradients, receiver.columns,
      [this](std::vector<at::Tensor>& numbers) { row_norms_->sum(numbers); });
}

void LocalTables::take_local(std::vector<RowGradient> gradients) {
  const at::NoGradGuard no_grad;
  if (!keeps_local_ && kept_.empty()) {
    return take(local_receiver_, averaged(std::move(gradients)));
  }
  kept_.resize(gradients.size());
  for (std::size_t t = 0; t < gradients.size(); ++t) {
    const at::Tensor& weight = shards_[local_receiver_.shards[t]].weight;
    const at::Tensor own = sparse_of(gradients[t], weight);
    kept_[t] = (kept_[t].defined() ? kept_[t] + own : own).coalesce();
    gradients[t] = {kept_[t].indices()[0].contiguous(), kept_[t].values().to(at::kFloat)};
  }
  if (keeps_local_) return;
  kept_.clear();
  take(local_receiver_, averaged(std::move(gradients)));
}

bool LocalTables::keep_local_gradients(bool is_kept) {
  TESSERA_CHECK_VALUE(options_.gradients == GradientForm::kSparse, layout_->operation,
                      ": no_sync() is for sparse gradients, which add up over passes.");
  return std::exchange(keeps_local_, is_kept);
}

std::vector<RowGradient> LocalTables::averaged(std::vector<RowGradient> gradients) const {
  const at::NoGradGuard no_grad;
  if (group_.size() == 1) return gradients;
  const auto world = static_cast<std::size_t>(group_.size());
  std::vector<std::int64_t> counts;
  std::vector<at::Tensor> own_rows;
  std::vector<at::Tensor> own_values;
  for (const RowGradient& gradient : gradients) {
    counts.push_back(gradient.rows.numel());
    own_rows.push_back(gradient.rows);
    own_values.push_back(gradient.values.reshape({-1}));
  }
  const at::Device device = comm::message_device(*group_.process_group());
  const at::Tensor all_counts =
      comm::all_gather(at::tensor(counts, at::kLong).unsqueeze(0).to(device), group_)
          .cpu()
          .contiguous();
  const auto* count = all_counts.const_data_ptr<std::int64_t>();
  const auto count_of = [&](std::size_t rank, std::size_t table) {
    return count[rank * gradients.size() + table];
  };
  std::vector<std::int64_t> rows_of(world, 0);
  std::vector<std::int64_t> values_of(world, 0);
  for (std::size_t r = 0; r < world; ++r) {
    for (std::size_t t = 0; t < gradients.size(); ++t) {
      rows_of[r] += count_of(r, t);
      values_of[r] += count_of(r, t) * gradients[t].values.size(1);
    }
  }
  const auto all_rows = comm::all_gather_v_async(at::cat(own_rows), group_, rows_of);
  const at::Tensor values = comm::all_gather_v(at::cat(own_values), group_, values_of);
  const at::Tensor rows = all_rows.wait();

  std::vector<std::vector<at::Tensor>> rows_by(gradients.size());
  std::vector<std::vector<at::Tensor>> values_by(gradients.size());
  std::int64_t row = 0;
  std::int64_t value = 0;
  for (std::size_t r = 0; r < world; ++r) {
    for (std::size_t t = 0; t < gradients.size(); ++t) {
      const std::int64_t columns = gradients[t].values.size(1);
      const std::int64_t num = count_of(r, t);
      rows_by[t].push_back(rows.narrow(0, row, num));
      values_by[t].push_back(values.narrow(0, value, num * columns).view({num, columns}));
      row += num;
      value += num * columns;
    }
  }
  std::vector<RowGradient> result;
  for (std::size_t t = 0; t < gradients.size(); ++t) {
    const at::Tensor& weight = shards_[local_receiver_.shards[t]].weight;
    const at::Tensor sum =
        at::_sparse_coo_tensor_unsafe(
            at::cat(rows_by[t]).unsqueeze(0), at::cat(values_by[t]), weight.sizes(),
            at::TensorOptions(at::kFloat).device(weight.device()).layout(at::kSparse))
            .coalesce();
    result.push_back({sum.indices()[0].contiguous(), sum.values().div(group_.size())});
  }
  return result;
}

std::vector<LocalShard> LocalTables::shards() const {
  write_back();
  std::vector<LocalShard> all = shards_;
  for (const auto& optimizer : optimizers()) {
    const auto state = optimizer->state_dict();
    for (LocalShard& shard : all) {
      for (const char* name : {"momentum1", "momentum2"}) {
        const auto found = state.find(shard.name + "." + name);
        if (found != state.end()) shard.state[name] = found->second;
      }
    }
  }
  return all;
}

std::vector<std::shared_ptr<RowOptimizer>> LocalTables::optimizers() const {
  std::vector<std::shared_ptr<RowOptimizer>> all;
  for (const auto* receiver : {&routed_receiver_, &local_receiver_}) {
    if (receiver->optimizer) all.push_back(receiver->optimizer);
  }
  return all;
}

void LocalTables::check_exchanged() const {
  TESSERA_CHECK_VALUE(kept_.empty(), layout_->operation,
                      ": the last passes were under no_sync(), and data-parallel tables have not "
                      "exchanged their gradients. Take the last pass outside of it.");
}

void LocalTables::step() {
  TESSERA_CHECK_VALUE(options_.gradients == GradientForm::kSparse, layout_->operation,
                      ": step() is for sparse gradients; here ",
                      options_.gradients == GradientForm::kFused ? "backward steps the rows."
                                                                 : "gradients are dense.");
  check_exchanged();
  if (row_norms_ != nullptr && routed_receiver_.optimizer) {
    step_rows(routed_receiver_, kept_gradients(routed_receiver_));
    if (local_receiver_.optimizer) local_receiver_.optimizer->step();
    return;
  }
  for (const auto& optimizer : optimizers()) optimizer->step();
}

std::vector<RowGradient> LocalTables::kept_gradients(const Receiver& receiver) const {
  std::vector<RowGradient> gradients;
  for (std::size_t i = 0; i < receiver.shards.size(); ++i) {
    if (receiver.is_dense[i]) continue;
    const at::Tensor& weight = shards_[receiver.shards[i]].weight;
    const at::Tensor gradient = weight.grad();
    if (gradient.defined()) {
      const at::Tensor once = gradient.coalesce();
      gradients.push_back({once.indices()[0].contiguous(), once.values().to(at::kFloat)});
    } else {
      const auto options = at::TensorOptions().device(weight.device());
      gradients.push_back({at::empty({0}, options.dtype(at::kLong)),
                           at::empty({0, weight.size(1)}, options.dtype(at::kFloat))});
    }
  }
  return gradients;
}

void LocalTables::zero_grad() {
  kept_.clear();
  for (const LocalShard& shard : shards_) shard.weight.mutable_grad() = at::Tensor();
}

double LocalTables::clip_grad_norm(double max_norm) {
  TESSERA_CHECK_VALUE(max_norm >= 0, layout_->operation, ": max_norm is ", max_norm,
                      "; it must not be negative.");
  TESSERA_CHECK_VALUE(options_.gradients != GradientForm::kFused, layout_->operation,
                      ": backward steps the rows; there are no gradients to clip.");
  check_exchanged();
  const at::NoGradGuard no_grad;
  double own = 0;
  double shared = 0;  // the same on every rank
  std::vector<at::Tensor> values;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    at::Tensor& gradient = shards_[i].weight.mutable_grad();
    if (!gradient.defined()) continue;
    if (gradient.is_sparse() && !gradient.is_coalesced()) gradient = gradient.coalesce();
    values.push_back(gradient.is_sparse() ? gradient._values() : gradient);
    const double square = values.back().to(at::kDouble).pow(2).sum().item<double>();
    (is_local(layout_->sharding(table_of_shard_[i])) ? shared : own) += square;
  }
  if (group_.size() > 1) {
    const at::Device device = comm::message_device(*group_.process_group());
    own = comm::all_reduce(at::full({1}, own, at::kDouble).to(device), group_).item<double>();
  }
  const double norm = std::sqrt(own + shared);
  if (norm > max_norm) {
    for (const at::Tensor& value : values) value.mul_(max_norm / norm);
  }
  return norm;
}

void LocalTables::set_learning_rate(double learning_rate) {
  for (const auto& optimizer : optimizers()) optimizer->set_learning_rate(learning_rate);
}

}  // namespace tessera::sharding
