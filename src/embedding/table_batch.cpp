#include "tessera/embedding/table_batch.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <set>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "core/autograd.h"
#include "core/kept_memory.h"
#include "embedding/lookup_input.h"
#include "embedding/row_cache.h"
#include "embedding/table_pass.h"
#include "tessera/core/check.h"

namespace tessera::embedding {

using detail::TablePass;
using detail::TableTarget;

namespace {

using detail::check_input;
using detail::make_pass;
using detail::report;
using State = TableBatch::State;

/// The rows of one call in the cache, which keeps them as long as this lives.
struct HeldRows {
  HeldRows(std::shared_ptr<State> of, std::unique_ptr<detail::Admission> rows)
      : state(std::move(of)), admission(std::move(rows)) {
    ++state->num_held;
  }
  ~HeldRows() { --state->num_held; }
  HeldRows(const HeldRows&) = delete;
  HeldRows& operator=(const HeldRows&) = delete;

  std::shared_ptr<State> state;
  std::unique_ptr<detail::Admission> admission;
};

/// Calls that may be prefetched and not looked up yet; further ones push out the oldest.
constexpr std::size_t kMostAhead = 4;

/// What was prefetched for these tensors, or null.
std::unique_ptr<detail::Admission> take_ahead(State& state, const LookupInput& input) {
  const std::scoped_lock lock(state.ahead_mutex);
  for (auto at = state.ahead.begin(); at != state.ahead.end(); ++at) {
    // Its tensors are alive, so that nobody else's are at the same place.
    const bool is_it = (*at)->ids.const_data_ptr() == input.ids.const_data_ptr() &&
                       (*at)->ids.numel() == input.ids.numel() &&
                       (*at)->offsets.numel() == input.offsets.numel();
    if (!is_it) continue;
    auto found = std::move(*at);
    state.ahead.erase(at);
    return found;
  }
  return nullptr;
}

/// Brings the rows of a call into the cache and makes `pass` one of the cache; null if there is
/// none. Ids are checked before.
std::unique_ptr<HeldRows> hold_rows(const std::shared_ptr<State>& state, const LookupInput& input,
                                    TablePass& pass) {
  if (state->cache == nullptr) return nullptr;
  auto admission = take_ahead(*state, input);
  if (admission == nullptr) admission = state->cache->admit(pass, input);
  auto held = std::make_unique<HeldRows>(state, std::move(admission));
  state->cache->finish(*held->admission);
  state->cache->place(*held->admission, pass);
  return held;
}

/// Checks ids that are about to become slots.
void check_ids(State& state, const LookupInput& input, const TablePass& pass) {
  if (state.cache == nullptr || state.options.bounds_check == BoundsCheckMode::kIgnore) return;
  const std::scoped_lock lock(state.workspace.mutex);
  const std::int64_t bad = detail::cuda_check(pass, state.workspace, state.device());
  if (bad == -2) detail::refuse_offsets(pass.is_sequence);
  report(state, pass, input, bad);
}

void look_up(State& state, const LookupInput& input, const TablePass& pass,
             const at::Tensor& output) {
  if (output.is_cuda()) {
    const std::scoped_lock lock(state.workspace.mutex);
    const bool is_checked =
        state.options.bounds_check != BoundsCheckMode::kIgnore && state.cache == nullptr;
    const std::int64_t bad = detail::cuda_lookup(pass, state.workspace, is_checked, output);
    if (bad == -2) detail::refuse_offsets(pass.is_sequence);
    report(state, pass, input, bad);
    return;
  }
  report(state, pass, input, detail::cpu_lookup(pass, output.data_ptr<float>()));
}

std::vector<std::int64_t> output_shape(const State& state, const LookupInput& input,
                                       const TablePass& pass) {
  if (pass.is_sequence || !input.batch_sizes.empty()) return {pass.num_outputs};
  return {pass.num_bags / static_cast<std::int64_t>(state.features.size()), state.num_columns};
}

/// One call, kept until its backward.
struct Call : torch::CustomClassHolder {
  std::shared_ptr<State> state;
  std::uint64_t number = 0;
  std::vector<std::int64_t> batch_sizes;
  bool is_sequence = false;
  FeatureRange later;              // not looked up in forward
  RowMemory memory;                // forward's
  std::unique_ptr<HeldRows> held;  // until backward; null without a cache
};
using CallPtr = c10::intrusive_ptr<Call>;
using MaybeVariable = std::optional<Variable>;

TableTarget target_of(State& state, std::size_t i, bool is_wanted) {
  const at::Tensor& weight = state.tables[i].weight;
  TableTarget target;
  target.rows = detail::rows_of(weight);
  switch (state.options.gradients) {
    case GradientForm::kFused:
      target.kind = TableTarget::Kind::kStep;
      target.state = state.optimizer->state().state_of(i);
      target.step = state.optimizer->state().step_of(i);
      return target;
    case GradientForm::kDense:
      if (!is_wanted) return target;
      target.kind = TableTarget::Kind::kDense;
      target.values = at::zeros(weight.sizes(), weight.options().dtype(at::kFloat));
      return target;
    case GradientForm::kSparse:
      if (is_wanted) target.kind = TableTarget::Kind::kSparse;
      return target;
  }
  return target;
}

Variable gradient_of(const at::Tensor& weight, const TableTarget& target) {
  if (target.kind == TableTarget::Kind::kDense) return target.values.to(weight.scalar_type());
  if (target.kind != TableTarget::Kind::kSparse) return {};
  return at::_sparse_coo_tensor_unsafe(target.indices.unsqueeze(0),
                                       target.values.to(weight.scalar_type()), weight.sizes(),
                                       weight.options().layout(at::kSparse), /*is_coalesced=*/true);
}

/// Notes the rows of the ids of a fused step; an id outside its table stepped row 0.
void note_rows(State& state, const TablePass& pass, const LookupInput& input) {
  std::vector<RowOptimizer::State::Rows>& tables = state.optimizer->state().tables;
  if (!tables.front().is_stepped.defined()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor offsets = input.offsets.to(at::kLong).cpu();
  const auto* first = offsets.const_data_ptr<std::int64_t>();
  for (std::size_t f = 0; f < pass.features.size(); ++f) {
    const kernels::TableFeature& feature = pass.features[f];
    const std::int64_t begin = first[feature.first_bag];
    const std::int64_t end = first[feature.first_bag + feature.num_bags];
    at::Tensor& is_stepped = tables[static_cast<std::size_t>(pass.table_of[f])].is_stepped;
    if (begin == end || is_stepped.numel() == 0) continue;
    const at::Tensor ids = input.ids.slice(0, begin, end).to(at::kLong);
    is_stepped.index_fill_(0, ids.masked_fill(ids.lt(0).logical_or_(ids.ge(is_stepped.size(0))), 0),
                           true);
  }
}

struct Lookup : Function<Lookup> {
  static Variable forward(AutogradContext* context, at::TensorList /*weights*/,
                          const MaybeVariable& sample_weights, const Variable& ids,
                          const Variable& offsets, const CallPtr& call) {
    const LookupInput input{ids, offsets, sample_weights.value_or(Variable()), call->batch_sizes};
    State& state = *call->state;
    TablePass pass = make_pass(state, input, call->is_sequence, state.num_columns);
    check_ids(state, input, pass);
    call->held = hold_rows(call->state, input, pass);
    at::Tensor output =
        call->memory
            ? std::exchange(call->memory, nullptr)(pass.num_outputs)
            : core::empty_kept(output_shape(state, input, pass),
                               at::TensorOptions().dtype(at::kFloat).device(state.device()));
    if (call->later.begin == call->later.end) {
      look_up(state, input, pass, output);
    } else {
      TablePass now = pass;
      now.features.erase(now.features.begin() + call->later.begin,
                         now.features.begin() + call->later.end);
      look_up(state, input, now, output);
    }
    context->save_for_backward({ids, offsets, sample_weights.value_or(Variable())});
    carry(context, call);
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto call = carried<Call>(context);
    const auto saved = context->get_saved_variables();
    State& state = *call->state;
    const LookupInput input{saved[0], saved[1], saved[2], call->batch_sizes};
    at::Tensor grad = grads[0].to(at::kFloat);
    if (grad.dim() != 2 || grad.stride(1) != 1) grad = grad.contiguous();
    const std::int64_t row_stride = grad.dim() == 2 ? grad.stride(0) : state.num_columns;
    TablePass pass = make_pass(state, input, call->is_sequence, row_stride);
    pass.number = call->number;
    // A graph that is gone through again has let its rows go.
    if (call->held == nullptr) {
      call->held = hold_rows(call->state, input, pass);
    } else {
      state.cache->place(*call->held->admission, pass);
    }

    const bool is_fused = state.options.gradients == GradientForm::kFused;
    const bool has_anchor = state.has_anchor();
    const std::size_t num_weights = has_anchor ? 1 : state.tables.size();
    variable_list found(num_weights + 4);
    if (input.weights.defined() && context->needs_input_grad(num_weights)) {
      // Before the rows are stepped: it is the gradient at the rows that were read.
      at::Tensor of_weights = at::empty_like(input.weights);
      if (grad.is_cuda()) {
        const std::scoped_lock lock(state.workspace.mutex);
        detail::cuda_weight_gradient(pass, state.workspace, grad, of_weights);
      } else {
        detail::cpu_weight_gradient(pass, grad.const_data_ptr<float>(),
                                    of_weights.data_ptr<float>());
      }
      found[num_weights] = of_weights;
    }

    const std::scoped_lock lock(state.workspace.mutex);
    if (is_fused) ++state.optimizer->state().num_steps;
    std::vector<TableTarget> targets;
    targets.reserve(state.tables.size());
    for (std::size_t i = 0; i < state.tables.size(); ++i) {
      targets.push_back(target_of(state, i, has_anchor || context->needs_input_grad(i)));
      if (state.cache != nullptr) state.cache->place(i, targets.back());
    }
    const auto limit = static_cast<float>(state.options.optimizer.max_gradient);
    if (grad.is_cuda()) {
      detail::cuda_backward(pass, grad, limit, state.workspace, targets);
    } else {
      detail::cpu_backward(pass, grad.const_data_ptr<float>(), limit, state.workspace, targets);
    }
    call->held = nullptr;
    if (is_fused) note_rows(state, pass, input);
    if (state.options.sink) {
      std::vector<RowGradient> gradients;
      gradients.reserve(targets.size());
      for (TableTarget& target : targets) gradients.push_back({target.indices, target.values});
      state.options.sink(std::move(gradients));
    }
    for (std::size_t i = 0; i < targets.size() && !has_anchor; ++i) {
      found[i] = gradient_of(state.tables[i].weight, targets[i]);
    }
    return found;
  }
};

at::Tensor look_up(const std::shared_ptr<State>& state, const LookupInput& input, bool is_sequence,
                   std::uint64_t number, FeatureRange later = {}, const RowMemory& memory = {}) {
  check_input(*state, input, is_sequence);
  auto call = c10::make_intrusive<Call>();
  call->state = state;
  call->number = number;
  call->batch_sizes = input.batch_sizes;
  call->is_sequence = is_sequence;
  call->later = later;
  call->memory = memory;
  variable_list weights;
  if (state->has_anchor()) {
    weights.push_back(state->anchor);
  } else {
    for (const Table& table : state->tables) weights.push_back(table.weight);
  }
  return Lookup::apply(at::TensorList(weights),
                       input.weights.defined() ? MaybeVariable(input.weights) : std::nullopt,
                       input.ids, input.offsets, call);
}

/// The part of a backward pass that needs no gradient, and of a lookup that can wait.
class Preparation {
 public:
  Preparation(std::shared_ptr<State> state, const LookupInput& input, std::uint64_t number,
              FeatureRange later)
      : state_(std::move(state)),
        input_(input),
        pass_(make_pass(*state_, input_, /*is_sequence=*/false, state_->num_columns)),
        later_(later) {
    pass_.number = number;
    const bool is_fused = state_->options.gradients == GradientForm::kFused;
    for (const Table& table : state_->tables) {
      TableTarget& target = targets_.emplace_back();
      target.rows = detail::rows_of(table.weight);
      target.kind = is_fused ? TableTarget::Kind::kStep : TableTarget::Kind::kSparse;
    }
    if (later.begin == later.end) return;
    first_output_ = pass_.features[static_cast<std::size_t>(later.begin)].output;
    last_output_ = later.end == static_cast<std::int64_t>(pass_.features.size())
                       ? pass_.num_outputs
                       : pass_.features[static_cast<std::size_t>(later.end)].output;
  }

  bool run() {
    const std::scoped_lock lock(state_->workspace.mutex);
    return detail::cpu_prepare_backward(pass_, state_->workspace, targets_);
  }

  bool look_up_next(const at::Tensor& output) {
    if (later_.begin == later_.end) return false;
    TESSERA_CHECK_VALUE(output.is_contiguous() && output.scalar_type() == at::kFloat &&
                            output.is_cpu() && output.numel() == last_output_ - first_output_,
                        "embedding.look_up_later: the output must be a contiguous tensor of ",
                        last_output_ - first_output_, " float32.");
    TablePass one = pass_;
    one.features = {pass_.features[static_cast<std::size_t>(later_.begin++)]};
    one.features[0].output -= first_output_;
    look_up(*state_, input_, one, output);
    return true;
  }

 private:
  std::shared_ptr<State> state_;
  LookupInput input_;  // what the pass points into
  TablePass pass_;
  FeatureRange later_;  // what is left of it
  std::int64_t first_output_ = 0;
  std::int64_t last_output_ = 0;
  std::vector<TableTarget> targets_;
};

}  // namespace

TableBatch::TableBatch(std::vector<Table> tables, std::vector<Feature> features,
                       TableBatchOptions options)
    : state_(std::make_shared<State>()) {
  const char* operation = "embedding.table_batch";
  TESSERA_CHECK_VALUE(!tables.empty() && !features.empty(), operation, ": there are ",
                      tables.size(), " tables and ", features.size(),
                      " features; there must be at least one of each.");
  std::set<std::string> names;
  for (const Table& table : tables) {
    detail::check_weight(operation, table.name, table.weight);
    TESSERA_CHECK_VALUE(table.weight.device() == tables.front().weight.device(), operation,
                        ": table '", table.name, "' is on ", table.weight.device(), ", table '",
                        tables.front().name, "' is on ", tables.front().weight.device(), ".");
    TESSERA_CHECK_VALUE(names.insert(table.name).second, operation, ": there are two tables '",
                        table.name, "'.");
  }
  const auto num_tables = static_cast<std::int64_t>(tables.size());
  for (const Feature& feature : features) {
    TESSERA_CHECK_VALUE(feature.table >= 0 && feature.table < num_tables, operation, ": feature '",
                        feature.name, "' names table ", feature.table, " of ", num_tables, ".");
    state_->num_columns += tables[static_cast<std::size_t>(feature.table)].weight.size(1);
  }
  if (options.gradients == GradientForm::kFused) {
    std::vector<std::pair<std::string, at::Tensor>> weights;
    for (const Table& table : tables) weights.emplace_back(table.name, table.weight);
    state_->optimizer = std::make_shared<RowOptimizer>(std::move(weights), options.optimizer);
  } else {
    // The limit belongs to the optimizer; gradients that are handed out are not changed.
    options.optimizer.max_gradient = std::numeric_limits<double>::infinity();
  }
  for (const Table& table : tables) {
    TESSERA_CHECK_VALUE(table.cached_rows >= 0, operation, ": table '", table.name, "' has ",
                        table.cached_rows, " cached rows.");
    if (table.cached_rows == 0) continue;
    TESSERA_CHECK_VALUE(detail::is_mapped(table.weight), operation, ": table '", table.name,
                        "' has a cache, but it does not lie in host memory that a GPU reaches. "
                        "Make it with mapped_rows.");
    TESSERA_CHECK_VALUE(options.gradients == GradientForm::kFused, operation, ": table '",
                        table.name,
                        "' has a cache, and its rows are not stepped in backward. Use fused "
                        "gradients, or no cache.");
  }
  if (std::any_of(tables.begin(), tables.end(),
                  [](const Table& table) { return table.cached_rows > 0; })) {
    state_->cache = detail::make_row_cache(tables, options.cache_policy, state_->optimizer.get());
  }
  TESSERA_CHECK_VALUE(!options.sink || options.gradients == GradientForm::kSparse, operation,
                      ": a sink takes sparse gradients; ask for those.");
  state_->anchor =
      at::empty({0}, at::TensorOptions().dtype(at::kFloat).device(tables.front().weight.device()));
  state_->anchor.requires_grad_(true);
  state_->tables = std::move(tables);
  state_->features = std::move(features);
  state_->options = std::move(options);
}

at::Tensor TableBatch::pooled(const LookupInput& input) const {
  return look_up(state_, input, /*is_sequence=*/false, ++state_->num_calls);
}

PreparedRows TableBatch::pooled_ahead(const LookupInput& input, FeatureRange later,
                                      const RowMemory& memory) const {
  const auto num_features = static_cast<std::int64_t>(state_->features.size());
  TESSERA_CHECK_VALUE(later.begin >= 0 && later.begin <= later.end && later.end <= num_features &&
                          (later.begin == later.end || !input.batch_sizes.empty()),
                      "embedding.pooled_ahead: features ", later.begin, " to ", later.end, " of ",
                      num_features, " cannot be left for later",
                      input.batch_sizes.empty() ? " without batch sizes." : ".");
  TESSERA_CHECK_VALUE(!memory || (state_->device().is_cpu() && !input.batch_sizes.empty()),
                      "embedding.pooled_ahead: memory for the rows goes with tables on the CPU and "
                      "with batch sizes.");
  if (!state_->device().is_cpu()) later = {};
  const std::uint64_t number = ++state_->num_calls;
  PreparedRows result;
  result.rows = look_up(state_, input, /*is_sequence=*/false, number, later, memory);
  const bool prepares = result.rows.requires_grad() && state_->has_anchor() && result.rows.is_cpu();
  const bool is_left = later.begin < later.end;
  if (!prepares && !is_left) return result;
  const auto preparation = std::make_shared<Preparation>(state_, input, number, later);
  if (prepares) result.prepare = [preparation] { return preparation->run(); };
  if (is_left) {
    result.look_up_later = [preparation](const at::Tensor& output) {
      return preparation->look_up_next(output);
    };
  }
  return result;
}

void TableBatch::pooled_out(const LookupInput& input, at::Tensor& output) const {
  const at::NoGradGuard no_grad;
  check_input(*state_, input, /*is_sequence=*/false);
  TablePass pass = make_pass(*state_, input, /*is_sequence=*/false, state_->num_columns);
  TESSERA_CHECK_VALUE(output.is_contiguous() && output.scalar_type() == at::kFloat &&
                          output.device() == state_->device() &&
                          output.sizes() == at::IntArrayRef(output_shape(*state_, input, pass)),
                      "embedding.pooled_out: the output must be a contiguous tensor of float32, ",
                      at::IntArrayRef(output_shape(*state_, input, pass)), ".");
  check_ids(*state_, input, pass);
  const auto held = hold_rows(state_, input, pass);
  look_up(*state_, input, pass, output);
}

void TableBatch::prefetch(const LookupInput& input) const {
  if (state_->cache == nullptr) return;
  const at::NoGradGuard no_grad;
  check_input(*state_, input, /*is_sequence=*/false);
  // Which rows are wanted does not depend on where the results go.
  const TablePass pass = make_pass(*state_, input, /*is_sequence=*/false, state_->num_columns);
  auto admission = state_->cache->admit(pass, input);
  const std::scoped_lock lock(state_->ahead_mutex);
  if (state_->ahead.size() == kMostAhead) state_->ahead.erase(state_->ahead.begin());
  state_->ahead.push_back(std::move(admission));
}

void TableBatch::write_back() const {
  if (state_->cache == nullptr) return;
  TESSERA_CHECK_VALUE(state_->num_held == 0, "embedding.write_back: ", state_->num_held.load(),
                      " calls are between their forward and their backward.");
  {
    const std::scoped_lock lock(state_->ahead_mutex);
    state_->ahead.clear();
  }
  state_->cache->write_back();
}

std::vector<RowCacheStatistics> TableBatch::cache_statistics() const {
  return state_->cache == nullptr ? std::vector<RowCacheStatistics>{} : state_->cache->statistics();
}

at::Tensor TableBatch::sequence(const LookupInput& input) const {
  return look_up(state_, input, /*is_sequence=*/true, ++state_->num_calls);
}

const std::vector<Table>& TableBatch::tables() const noexcept { return state_->tables; }
const std::vector<Feature>& TableBatch::features() const noexcept { return state_->features; }
const TableBatchOptions& TableBatch::options() const noexcept { return state_->options; }
std::int64_t TableBatch::num_columns() const noexcept { return state_->num_columns; }
const std::shared_ptr<RowOptimizer>& TableBatch::optimizer() const noexcept {
  return state_->optimizer;
}
std::int64_t TableBatch::workspace_bytes() const noexcept { return state_->workspace.bytes(); }

at::Tensor empty_rows(std::int64_t rows, std::int64_t columns, at::ScalarType type,
                      at::Device device) {
  at::Tensor tensor = at::empty({rows, columns}, at::TensorOptions().dtype(type).device(device));
  if (device.is_cpu()) {
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
    const std::uintptr_t first = (begin + page - 1) / page * page;
    const std::uintptr_t last = (begin + tensor.nbytes()) / page * page;
    // A wish: where the system has no huge pages, ordinary ones do.
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
  return tensor;
}

at::Tensor mapped_rows(std::int64_t rows, std::int64_t columns, at::ScalarType type,
                       at::Device device) {
  return device.is_cuda() ? detail::make_mapped(rows, columns, type, device)
                          : empty_rows(rows, columns, type, device);
}

}  // namespace tessera::embedding
