#include "tessera/embedding/quantised_tables.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "embedding/quantised_device.h"
#include "tessera/core/check.h"
#include "tessera/embedding/table_batch.h"

namespace tessera::embedding {
namespace {

constexpr std::int64_t kRowsPerTask = 1024;

RowTable view_of(const QuantisedTableSpec& table, const at::Tensor& rows) {
  return {table.type, rows.const_data_ptr<std::uint8_t>(), rows.size(0), table.embedding_dim,
          rows.size(1)};
}

// The smallest of what several threads have found.
class First {
 public:
  void add(std::int64_t position) {
    std::int64_t known = position_.load();
    while (position < known && !position_.compare_exchange_weak(known, position)) {
    }
  }
  std::optional<std::int64_t> get() const {
    const std::int64_t position = position_.load();
    return position == kNone ? std::nullopt : std::optional(position);
  }

 private:
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::atomic<std::int64_t> position_{kNone};
};

}  // namespace

QuantisedTables::QuantisedTables(std::vector<QuantisedTableSpec> tables, PoolingType pooling,
                                 std::int64_t alignment, at::Device device)
    : tables_(std::move(tables)), pooling_(pooling), device_(device) {
  TESSERA_CHECK_VALUE(device.is_cpu() || (device.is_cuda() && detail::has_quantised_cuda()),
                      "embed.quantised: tables with few bits lie on the CPU",
                      detail::has_quantised_cuda() ? " or a CUDA device" : " in this build",
                      ", not on ", device, ".");
  TESSERA_CHECK_VALUE(alignment >= 1 && alignment <= 64, "embed.quantised: rows cannot begin at ",
                      "multiples of ", alignment, " bytes; 1 to 64 are possible.");
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const QuantisedTableSpec& table = tables_[t];
    TESSERA_CHECK_VALUE(table.num_embeddings >= 0 && table.embedding_dim >= 1,
                        "embed.quantised: table '", table.name, "' has ", table.num_embeddings,
                        " rows of ", table.embedding_dim, " columns.");
    TESSERA_CHECK_VALUE(
        pooling != PoolingType::kNone || table.embedding_dim == tables_[0].embedding_dim,
        "embed.quantised: without pooling all tables have one width; '", table.name, "' has ",
        table.embedding_dim, " columns, '", tables_[0].name, "' ", tables_[0].embedding_dim, ".");
    rows_.push_back(empty_rows(table.num_embeddings,
                               row_bytes(table.type, table.embedding_dim, alignment), at::kByte,
                               device)
                        .zero_());
    for (const std::string& feature : table.features) {
      features_.push_back({t, feature, width_});
      width_ += table.embedding_dim;
    }
  }
}

void QuantisedTables::assign(std::size_t table, const at::Tensor& numbers) {
  const QuantisedTableSpec& spec = tables_.at(table);
  TESSERA_CHECK_VALUE(numbers.dim() == 2 && numbers.size(0) == spec.num_embeddings &&
                          numbers.size(1) == spec.embedding_dim,
                      "embed.quantised: table '", spec.name, "' has ", spec.num_embeddings,
                      " rows of ", spec.embedding_dim, " columns; the numbers have shape ",
                      numbers.sizes(), ".");
  const at::Tensor plain = numbers.detach().to(at::kCPU, at::kFloat).contiguous();
  const at::Tensor made = at::zeros(rows_[table].sizes(), at::kByte);
  const auto* from = plain.const_data_ptr<float>();
  auto* to = made.data_ptr<std::uint8_t>();
  const std::int64_t stride = made.size(1);
  const auto width = static_cast<std::size_t>(spec.embedding_dim);
  First bad;
  at::parallel_for(0, spec.num_embeddings, kRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const RowFaults faults =
          quantise_row(spec.type, {from + r * spec.embedding_dim, width}, to + r * stride);
      if (faults.has_nan || faults.is_overflow) bad.add(r);
    }
  });
  TESSERA_CHECK_VALUE(!bad.get(), "embed.quantised: row ", bad.get().value_or(0), " of table '",
                      spec.name, "' holds a NaN or a number that ", name_of(spec.type),
                      " cannot hold. Clamp the table, or store it in bf16.");
  rows_[table].copy_(made);
}

at::Tensor QuantisedTables::dequantised(std::size_t table) const {
  const QuantisedTableSpec& spec = tables_.at(table);
  const at::Tensor bytes = rows_[table].cpu();
  const RowTable rows = view_of(spec, bytes);
  at::Tensor numbers = at::empty({spec.num_embeddings, spec.embedding_dim}, at::kFloat);
  auto* to = numbers.data_ptr<float>();
  const auto width = static_cast<std::size_t>(spec.embedding_dim);
  at::parallel_for(0, spec.num_embeddings, kRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      dequantise_row(spec.type, rows.data + r * rows.row_bytes,
                     {to + r * spec.embedding_dim, width});
    }
  });
  return numbers.to(device_);
}

at::Tensor QuantisedTables::forward(const at::Tensor& ids, const at::Tensor& offsets,
                                    const std::optional<at::Tensor>& weights) const {
  const auto num_features = static_cast<std::int64_t>(features_.size());
  for (const at::Tensor& tensor : {ids, offsets}) {
    TESSERA_CHECK_TYPE(tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt,
                       "embed.quantised: ids and offsets are int32 or int64, not ",
                       tensor.scalar_type(), ".");
    TESSERA_CHECK_VALUE(tensor.dim() == 1 && tensor.device() == device_,
                        "embed.quantised: ids and offsets are of one dimension, on ", device_,
                        "; one is ", tensor.sizes(), " on ", tensor.device(), ".");
  }
  TESSERA_CHECK_VALUE(
      num_features > 0 && offsets.numel() >= 1 && (offsets.numel() - 1) % num_features == 0,
      "embed.quantised: ", offsets.numel(), " offsets do not fit ", num_features,
      " features: one per bag and the end are needed.");
  const at::Tensor all_ids = ids.to(at::kLong).contiguous();
  const at::Tensor ends = offsets.to(at::kLong).contiguous();
  at::Tensor factors;
  if (weights && weights->defined()) {
    TESSERA_CHECK_VALUE(weights->numel() == ids.numel(), "embed.quantised: there are ",
                        weights->numel(), " weights for ", ids.numel(), " ids.");
    factors = weights->detach().to(device_, at::kFloat).contiguous();
  }
  const std::int64_t batch = (ends.numel() - 1) / num_features;
  if (device_.is_cuda()) return forward_on_device(all_ids, ends, factors, batch);
  const auto* end = ends.const_data_ptr<std::int64_t>();
  bool is_ascending = end[0] >= 0 && end[ends.numel() - 1] <= ids.numel();
  for (std::int64_t i = 0; i + 1 < ends.numel(); ++i) is_ascending &= end[i] <= end[i + 1];
  TESSERA_CHECK_VALUE(is_ascending, "embed.quantised: offsets must ascend from 0 to at most ",
                      ids.numel(), ", the number of ids.");
  const bool is_sequence = pooling_ == PoolingType::kNone;
  const std::int64_t dim = is_sequence ? tables_[0].embedding_dim : width_;
  at::Tensor output = at::empty({is_sequence ? ids.numel() : batch, dim}, at::kFloat);
  auto* to = output.data_ptr<float>();
  First bad;
  at::parallel_for(0, num_features, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t f = first; f < last; ++f) {
      const Feature& feature = features_[static_cast<std::size_t>(f)];
      const RowTable table = view_of(tables_[feature.table], rows_[feature.table]);
      RowBags bags;
      bags.ids = all_ids.const_data_ptr<std::int64_t>();
      bags.offsets = {end + f * batch, static_cast<std::size_t>(batch + 1)};
      bags.weights = factors.defined() ? factors.const_data_ptr<float>() : nullptr;
      bags.is_mean = pooling_ == PoolingType::kMean;
      const auto found = is_sequence ? copy_rows(table, bags, to + bags.offsets[0] * dim, dim)
                                     : pool_rows(table, bags, to + feature.column, width_);
      if (found) bad.add(*found);
    }
  });
  if (const auto position = bad.get()) refuse_id(all_ids, ends, batch, *position);
  return output;
}

void QuantisedTables::refuse_id(const at::Tensor& ids, const at::Tensor& offsets,
                                std::int64_t batch, std::int64_t position) const {
  const auto* end = offsets.const_data_ptr<std::int64_t>();
  const auto bag = std::upper_bound(end, end + offsets.numel(), position) - end - 1;
  const Feature& feature = features_[static_cast<std::size_t>(bag / batch)];
  const QuantisedTableSpec& table = tables_[feature.table];
  TESSERA_CHECK_INDEX(false, "embed.quantised: table '", table.name, "' has ", table.num_embeddings,
                      " rows; id ", ids.const_data_ptr<std::int64_t>()[position], " at position ",
                      position - end[bag / batch * batch], " of feature '", feature.name,
                      "' is not one of them.");
}

at::Tensor QuantisedTables::forward_on_device(const at::Tensor& ids, const at::Tensor& offsets,
                                              const at::Tensor& weights, std::int64_t batch) const {
  detail::QuantisedPass pass;
  for (const Feature& feature : features_) {
    const QuantisedTableSpec& table = tables_[feature.table];
    pass.features.push_back({view_of(table, rows_[feature.table]),
                             pooling_ == PoolingType::kNone ? 0 : feature.column,
                             pooling_ == PoolingType::kMean});
  }
  pass.ids = ids;
  pass.offsets = offsets;
  pass.weights = weights;
  pass.batch = batch;
  pass.is_sequence = pooling_ == PoolingType::kNone;
  at::Tensor output = at::empty({pass.is_sequence ? ids.numel() : batch,
                                 pass.is_sequence ? tables_[0].embedding_dim : width_},
                                ids.options().dtype(at::kFloat));
  const std::int64_t bad = detail::quantised_lookup_cuda(pass, output);
  TESSERA_CHECK_VALUE(bad != -2, "embed.quantised: offsets must ascend from 0 to at most ",
                      ids.numel(), ", the number of ids.");
  if (bad < ids.numel()) refuse_id(ids.cpu(), offsets.cpu(), batch, bad);
  return output;
}

}  // namespace tessera::embedding
