#include "embedding/lookup_input.h"

#include <string>

#include <ATen/Functions.h>

#include "tessera/core/check.h"

namespace tessera::embedding::detail {
namespace {

using State = TableBatch::State;

bool is_integer(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt;
}

const char* name_of_call(bool is_sequence) {
  return is_sequence ? "embedding.sequence" : "embedding.pooled";
}

void check_offsets(const TablePass& pass) {
  bool is_right = pass.ids.offset(0) == 0 && pass.ids.offset(pass.num_bags) == pass.num_positions;
  for (std::int64_t bag = 0; bag < pass.num_bags; ++bag) {
    is_right &= pass.ids.offset(bag) <= pass.ids.offset(bag + 1);
  }
  if (!is_right) refuse_offsets(pass.is_sequence);
}

/// Fills in where the outputs of each feature lie. `row_stride`: from one sample of an even batch
/// to the next.
void place_outputs(const State& state, TablePass& pass, const LookupInput& input,
                   std::int64_t row_stride) {
  const bool is_even = input.batch_sizes.empty();
  const auto num_features = static_cast<std::int64_t>(state.features.size());
  // On the GPU the number of ids of each feature is known there only.
  at::Tensor bounds;
  bool has_one_width = true;
  for (const auto& feature : pass.features) {
    has_one_width &= feature.rows.num_columns == pass.features.front().rows.num_columns;
  }
  const bool needs_bounds = pass.is_sequence && !has_one_width && input.offsets.is_cuda();
  if (needs_bounds) bounds = input.offsets.to(at::kLong).cpu();
  std::int64_t output = 0;
  std::int64_t bag = 0;
  for (std::int64_t f = 0; f < num_features; ++f) {
    kernels::TableFeature& feature = pass.features[static_cast<std::size_t>(f)];
    feature.first_bag = bag;
    feature.num_bags = is_even ? pass.num_bags / num_features : input.batch_sizes[f];
    const std::int64_t columns = feature.rows.num_columns;
    feature.output = output;
    if (pass.is_sequence) {
      feature.output_stride = columns;
      if (needs_bounds) {
        const auto* offsets = bounds.const_data_ptr<std::int64_t>();
        output += (offsets[bag + feature.num_bags] - offsets[bag]) * columns;
      } else if (!input.offsets.is_cuda()) {
        output += (pass.ids.offset(bag + feature.num_bags) - pass.ids.offset(bag)) * columns;
      }
    } else {
      feature.output_stride = is_even ? row_stride : columns;
      output += is_even ? columns : feature.num_bags * columns;
    }
    bag += feature.num_bags;
  }
  if (pass.is_sequence && input.offsets.is_cuda() && has_one_width) {
    // With one width, a position's place is its number.
    for (auto& feature : pass.features) feature.output = -1;
    output = pass.num_positions * pass.features.front().rows.num_columns;
  }
  pass.num_outputs =
      !pass.is_sequence && is_even ? pass.num_bags / num_features * state.num_columns : output;
}

}  // namespace

void check_input(const State& state, const LookupInput& input, bool is_sequence) {
  const char* operation = name_of_call(is_sequence);
  const auto check = [&](const at::Tensor& tensor, const char* name) {
    TESSERA_CHECK_VALUE(tensor.defined() && tensor.dim() == 1 && tensor.is_contiguous(), operation,
                        ": the ", name, " must be a contiguous tensor of one dimension.");
    TESSERA_CHECK_VALUE(tensor.device() == state.device(), operation, ": the ", name, " are on ",
                        tensor.device(), ", the tables are on ", state.device(), ".");
  };
  check(input.ids, "ids");
  check(input.offsets, "offsets");
  TESSERA_CHECK_TYPE(is_integer(input.ids), operation, ": the ids are ", input.ids.scalar_type(),
                     "; they must be int32 or int64.");
  TESSERA_CHECK_TYPE(is_integer(input.offsets), operation, ": the offsets are ",
                     input.offsets.scalar_type(), "; they must be int32 or int64.");
  TESSERA_CHECK_VALUE(input.ids.numel() < (std::int64_t{1} << 32), operation, ": there are ",
                      input.ids.numel(), " ids in one call; there may be 4294967295.");
  if (input.weights.defined()) {
    check(input.weights, "weights");
    TESSERA_CHECK_TYPE(input.weights.scalar_type() == at::kFloat, operation, ": the weights are ",
                       input.weights.scalar_type(), "; they must be float32.");
    TESSERA_CHECK_VALUE(input.weights.numel() == input.ids.numel(), operation, ": there are ",
                        input.weights.numel(), " weights for ", input.ids.numel(), " ids.");
  }
  const auto num_features = static_cast<std::int64_t>(state.features.size());
  const std::int64_t num_bags = input.offsets.numel() - 1;
  if (input.batch_sizes.empty()) {
    TESSERA_CHECK_VALUE(num_bags >= 0 && num_bags % num_features == 0, operation, ": there are ",
                        input.offsets.numel(), " offsets, and one less is no multiple of the ",
                        num_features, " features.");
    return;
  }
  TESSERA_CHECK_VALUE(static_cast<std::int64_t>(input.batch_sizes.size()) == num_features,
                      operation, ": there are ", input.batch_sizes.size(), " batch sizes for ",
                      num_features, " features.");
  std::int64_t total = 0;
  for (const std::int64_t size : input.batch_sizes) {
    TESSERA_CHECK_VALUE(size >= 0, operation, ": a batch size is ", size, ".");
    total += size;
  }
  TESSERA_CHECK_VALUE(num_bags == total, operation, ": there are ", input.offsets.numel(),
                      " offsets for batch sizes that sum up to ", total,
                      "; there must be one more.");
}

void refuse_offsets(bool is_sequence) {
  TESSERA_CHECK_VALUE(false, name_of_call(is_sequence),
                      ": the offsets do not ascend from 0 to the number of ids.");
}

TablePass make_pass(const State& state, const LookupInput& input, bool is_sequence,
                    std::int64_t row_stride) {
  TablePass pass;
  pass.ids.ids = input.ids.const_data_ptr();
  pass.ids.offsets = input.offsets.const_data_ptr();
  pass.ids.weights = input.weights.defined() ? input.weights.const_data_ptr<float>() : nullptr;
  pass.ids.wide_ids = input.ids.scalar_type() == at::kLong;
  pass.ids.wide_offsets = input.offsets.scalar_type() == at::kLong;
  pass.is_sequence = is_sequence;
  pass.is_weighted = input.weights.defined();
  pass.num_bags = input.offsets.numel() - 1;
  pass.num_positions = input.ids.numel();
  pass.num_tables = state.tables.size();
  for (const Feature& feature : state.features) {
    const Table& table = state.tables[static_cast<std::size_t>(feature.table)];
    kernels::TableFeature entry;
    entry.rows = detail::rows_of(table.weight);
    entry.is_mean = !is_sequence && table.pooling == PoolingType::kMean;
    pass.features.push_back(entry);
    pass.table_of.push_back(feature.table);
  }
  if (input.offsets.is_cpu()) check_offsets(pass);
  place_outputs(state, pass, input, row_stride);
  return pass;
}

void report(const State& state, const TablePass& pass, const LookupInput& input,
            std::int64_t position) {
  const BoundsCheckMode mode = state.options.bounds_check;
  if (position < 0 || mode == BoundsCheckMode::kIgnore) return;
  static std::atomic<bool> has_warned{false};
  if (mode == BoundsCheckMode::kWarning && has_warned.exchange(true)) return;
  const at::Tensor offsets = input.offsets.to(at::kLong).cpu();
  const auto* first = offsets.const_data_ptr<std::int64_t>();
  std::size_t f = 0;
  while (first[pass.features[f].first_bag + pass.features[f].num_bags] <= position) ++f;
  const kernels::TableFeature& feature = pass.features[f];
  std::int64_t sample = 0;
  while (first[feature.first_bag + sample + 1] <= position) ++sample;
  const auto id = input.ids[position].item<std::int64_t>();
  const std::string& table = state.tables[static_cast<std::size_t>(pass.table_of[f])].name;
  if (mode == BoundsCheckMode::kFatal) {
    TESSERA_CHECK_INDEX(false, name_of_call(pass.is_sequence), ": feature '",
                        state.features[f].name, "', sample ", sample, " has id ", id,
                        ", but table '", table, "' has ", feature.rows.num_rows, " rows.");
  }
  TORCH_WARN(name_of_call(pass.is_sequence), ": feature '", state.features[f].name, "', sample ",
             sample, " has id ", id, ", but table '", table, "' has ", feature.rows.num_rows,
             " rows; row 0 is used. Further ids outside their tables are not reported.");
}

}  // namespace tessera::embedding::detail
