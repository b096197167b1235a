#include "tessera/checkpoint/tables.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "tessera/core/check.h"

namespace tessera::checkpoint {
namespace {

constexpr const char* kCut = ".columns-";

// Row-wise state of a table whose columns are cut: one tensor per cut, named by its columns.
std::string cut_name(const std::string& name, std::int64_t begin, std::int64_t end) {
  return name + kCut + std::to_string(begin) + "-" + std::to_string(end);
}

struct Columns {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// The columns that a stored tensor of this family stands for.
std::optional<Columns> columns_of(const std::string& stored, const std::string& name,
                                  std::int64_t table_columns) {
  if (stored == name) return Columns{0, table_columns};
  const std::string start = name + kCut;
  if (stored.rfind(start, 0) != 0) return std::nullopt;
  Columns columns;
  const char* const last = stored.data() + stored.size();
  const auto first = std::from_chars(stored.data() + start.size(), last, columns.begin);
  if (first.ec != std::errc() || first.ptr == last || *first.ptr != '-') return std::nullopt;
  const auto second = std::from_chars(first.ptr + 1, last, columns.end);
  if (second.ec != std::errc() || second.ptr != last) return std::nullopt;
  return columns;
}

void check_shard(const TableShard& shard) {
  TESSERA_CHECK_VALUE(shard.weight.defined() && shard.weight.dim() == 2,
                      "checkpoint: the part of '", shard.name,
                      "' is not a tensor [rows, columns].");
  for (const auto& [name, tensor] : shard.state) {
    const bool fits = tensor.defined() && tensor.dim() >= 1 && tensor.dim() <= 2 &&
                      tensor.sizes() == shard.weight.sizes().slice(0, tensor.dim());
    TESSERA_CHECK_VALUE(fits, "checkpoint: '", name, "' of '", shard.name,
                        "' has neither the shape of its part ", shard.weight.sizes(),
                        " nor one element per row.");
  }
}

PlacedTensor placed(std::string name, const TableShard& shard, const at::Tensor& tensor) {
  PlacedTensor result;
  result.name = std::move(name);
  result.shape = {shard.table_rows, shard.table_columns};
  Piece piece{{shard.row, shard.column}, tensor, shard.touched_rows};
  if (tensor.dim() == 1) {
    result.shape.pop_back();
    piece.offsets.pop_back();
  }
  result.is_replicated = shard.is_replicated;
  result.pieces.push_back(std::move(piece));
  return result;
}

class TableState final : public Stateful {
 public:
  TableState(std::shared_ptr<TableSource> source, std::optional<std::string> prefix,
             std::string optimizer_prefix);

  void collect(std::vector<PlacedTensor>& tensors, Values& values) override;
  void prepare(const Reader& source, std::vector<PlacedTensor>& tensors) override;
  void finish(const Values& values) override;

 private:
  // Row-wise state that was saved under other cuts of the columns.
  struct Merge {
    struct Part {
      at::Tensor rows;
      std::int64_t width = 0;  // columns of the target that it stands for
    };
    at::Tensor target;
    std::vector<Part> parts;
  };

  std::string name_of(const TableShard& shard, const std::string& slot) const;
  void prepare_rows(const Reader& source, const TableShard& shard, const std::string& name,
                    const at::Tensor& target, std::vector<PlacedTensor>& tensors);

  std::shared_ptr<TableSource> source_;
  std::optional<std::string> prefix_;
  std::string optimizer_prefix_;
  std::vector<Merge> merges_;
};

TableState::TableState(std::shared_ptr<TableSource> source, std::optional<std::string> prefix,
                       std::string optimizer_prefix)
    : source_(std::move(source)),
      prefix_(std::move(prefix)),
      optimizer_prefix_(std::move(optimizer_prefix)) {}

std::string TableState::name_of(const TableShard& shard, const std::string& slot) const {
  return optimizer_prefix_ + shard.name + "." + slot;
}

void TableState::collect(std::vector<PlacedTensor>& tensors, Values& values) {
  for (const TableShard& shard : source_->shards()) {
    check_shard(shard);
    if (prefix_) tensors.push_back(placed(*prefix_ + shard.name, shard, shard.weight));
    const std::int64_t end = shard.column + shard.weight.size(1);
    const bool is_cut = shard.column != 0 || end != shard.table_columns;
    for (const auto& [slot, tensor] : shard.state) {
      std::string name = name_of(shard, slot);
      if (is_cut && tensor.dim() == 1) name = cut_name(name, shard.column, end);
      tensors.push_back(placed(std::move(name), shard, tensor));
    }
  }
  for (const auto& [name, value] : source_->values()) values[optimizer_prefix_ + name] = value;
}

void TableState::prepare(const Reader& source, std::vector<PlacedTensor>& tensors) {
  merges_.clear();
  for (const TableShard& shard : source_->shards()) {
    check_shard(shard);
    if (prefix_) tensors.push_back(placed(*prefix_ + shard.name, shard, shard.weight));
    for (const auto& [slot, tensor] : shard.state) {
      if (tensor.dim() == 1) {
        prepare_rows(source, shard, name_of(shard, slot), tensor, tensors);
      } else {
        tensors.push_back(placed(name_of(shard, slot), shard, tensor));
      }
    }
  }
}

void TableState::prepare_rows(const Reader& source, const TableShard& shard,
                              const std::string& name, const at::Tensor& target,
                              std::vector<PlacedTensor>& tensors) {
  const std::int64_t end = shard.column + shard.weight.size(1);
  Merge merge{target, {}};
  std::int64_t covered = 0;
  for (const TensorInfo& info : source.tensors()) {
    const auto columns = columns_of(info.name, name, shard.table_columns);
    if (!columns) continue;
    const std::int64_t width = std::min(columns->end, end) - std::max(columns->begin, shard.column);
    if (width <= 0) continue;
    covered += width;
    if (columns->begin == shard.column && columns->end == end) {
      tensors.push_back(placed(info.name, shard, target));
      return;
    }
    merge.parts.push_back({at::empty(target.sizes(), target.options().device(at::kCPU)), width});
    tensors.push_back(placed(info.name, shard, merge.parts.back().rows));
  }
  // What is missing is found, and named, by the load.
  if (covered != end - shard.column) tensors.push_back(placed(name, shard, target));
  merges_.push_back(std::move(merge));
}

void TableState::finish(const Values& values) {
  // The state of a row is a mean over its columns, so that of a wider part is the mean of those of
  // the cuts, weighted by their columns. Exact in double where all are equal.
  for (const Merge& merge : merges_) {
    at::Tensor sum = at::zeros(merge.target.sizes(), at::kDouble);
    std::int64_t width = 0;
    for (const Merge::Part& part : merge.parts) {
      sum.add_(part.rows.to(at::kDouble), static_cast<double>(part.width));
      width += part.width;
    }
    at::Tensor(merge.target).copy_(sum.div_(static_cast<double>(width)));
  }
  merges_.clear();
  Values own;
  for (auto found = values.lower_bound(optimizer_prefix_);
       found != values.end() && found->first.rfind(optimizer_prefix_, 0) == 0; ++found) {
    own.emplace(found->first.substr(optimizer_prefix_.size()), found->second);
  }
  source_->restore(own);
}

}  // namespace

TableSource::~TableSource() = default;
void TableSource::restore(const Values&) {}

void add_tables(State& state, std::shared_ptr<TableSource> source,
                const std::optional<std::string>& prefix, const std::string& optimizer_prefix) {
  TESSERA_CHECK_VALUE(source != nullptr, "checkpoint: there are no tables to save.");
  state.add(std::make_shared<TableState>(std::move(source), prefix, optimizer_prefix));
}

void add_state(TableShard& shard, const embedding::RowOptimizer& optimizer,
               const std::string& table) {
  for (const auto& [name, tensor] : optimizer.state_dict()) {
    const std::string start = table + ".";
    if (name.rfind(start + "momentum", 0) == 0) shard.state[name.substr(start.size())] = tensor;
  }
  shard.touched_rows = optimizer.stepped_rows(table);
}

Values values_of(const embedding::RowOptimizer& optimizer, const std::string& name) {
  return {{name + ".step", optimizer.num_steps()},
          {name + ".lr", optimizer.options().learning_rate}};
}

void restore(embedding::RowOptimizer& optimizer, const std::string& name, const Values& values) {
  if (const auto rate = values.find(name + ".lr"); rate != values.end()) {
    optimizer.set_learning_rate(std::get<double>(rate->second));
  }
  if (const auto step = values.find(name + ".step"); step != values.end()) {
    auto state = optimizer.state_dict();
    state["step"] = at::full({}, std::get<std::int64_t>(step->second), at::kLong);
    optimizer.load_state_dict(state);
  }
}

namespace {

class WholeTables final : public TableSource {
 public:
  WholeTables(embedding::TableBatch batch, std::string group)
      : batch_(std::move(batch)), group_(std::move(group)) {}

  std::vector<TableShard> shards() override {
    std::vector<TableShard> shards;
    for (const embedding::Table& table : batch_.tables()) {
      TableShard shard;
      shard.name = name_of(table);
      shard.table_rows = table.weight.size(0);
      shard.table_columns = table.weight.size(1);
      shard.weight = table.weight;
      shard.is_replicated = true;
      if (batch_.optimizer()) add_state(shard, *batch_.optimizer(), table.name);
      shards.push_back(std::move(shard));
    }
    return shards;
  }

  Values values() override {
    Values values;
    if (!batch_.optimizer()) return values;
    for (const embedding::Table& table : batch_.tables()) {
      values.merge(values_of(*batch_.optimizer(), name_of(table)));
    }
    return values;
  }

  void restore(const Values& values) override {
    if (!batch_.optimizer()) return;
    checkpoint::restore(*batch_.optimizer(), name_of(batch_.tables().front()), values);
  }

 private:
  std::string name_of(const embedding::Table& table) const {
    return group_ + table.name + ".weight";
  }

  embedding::TableBatch batch_;
  std::string group_;
};

}  // namespace

std::shared_ptr<TableSource> whole_tables(embedding::TableBatch batch, std::string group) {
  return std::make_shared<WholeTables>(std::move(batch), std::move(group));
}

}  // namespace tessera::checkpoint
