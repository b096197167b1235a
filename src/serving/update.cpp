#include "serving/update.h"

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "serving/model_info.h"
#include "serving/published_rows.h"
#include "tessera/checkpoint/error.h"

namespace tessera::serving {
namespace {

using checkpoint::Dtype;
using checkpoint::TensorInfo;

[[noreturn]] void refuse(const checkpoint::Reader& reader, const std::string& what) {
  throw checkpoint::Error(checkpoint::ErrorKind::kInvalid,
                          "update: " + reader.folder() + ": " + what + ".");
}

const TensorInfo& fitting(const checkpoint::Reader& reader, const std::string& name,
                          const std::vector<std::int64_t>& shape) {
  const TensorInfo* found = reader.find(name);
  if (found == nullptr) refuse(reader, "has no tensor '" + name + "', which the model needs");
  const bool is_float =
      found->dtype == Dtype::kF32 || found->dtype == Dtype::kF16 || found->dtype == Dtype::kBf16;
  if (!is_float || found->shape != shape) {
    refuse(reader, "tensor '" + name + "' is " + checkpoint::name_of(found->dtype) + " " +
                       checkpoint::text_of(found->shape) + ", the model that is served has " +
                       checkpoint::text_of(shape) + ": export it, and reload");
  }
  return *found;
}

void write_row(const checkpoint::Reader& reader, const TableInfo& table, std::span<float> numbers,
               std::uint8_t* row, const std::string& which) {
  const auto faults = embedding::quantise_row(table.type, numbers, row);
  if (!faults.has_nan && !faults.is_overflow) return;
  refuse(reader,
         which + " of table '" + table.name + "' " +
             (faults.has_nan ? "holds a NaN"
                             : "holds numbers that " + std::string(embedding::name_of(table.type)) +
                                   " cannot"));
}

// The rows of a table that grows.
void write_ids(const checkpoint::Reader& reader, const PublishedRows& published, const Store& store,
               std::size_t t, Store::Draft& draft) {
  const TableInfo& table = store.model().tables[t];
  const std::string name = kTablePrefix + table.name;
  const TensorInfo* ids = reader.find(name + kIdsSuffix);
  if (ids == nullptr || ids->dtype != Dtype::kI64 || ids->shape.size() != 1) {
    refuse(reader, "has no ids of table '" + table.name + "', which grows: export it, and reload");
  }
  const TensorInfo& weights =
      fitting(reader, name + kWeightSuffix, {ids->shape[0], table.num_columns});
  published.each_id(*ids, weights,
                    {[&] { draft.clear_ids(t); }, [&](std::int64_t id) { draft.remove_id(t, id); },
                     [&](std::int64_t id, std::span<float> numbers) {
                       write_row(reader, table, numbers, draft.row_of_id(t, id),
                                 "the row of id " + std::to_string(id));
                     }});
  if (store.num_ids(draft.number(), t) != ids->shape[0]) {
    refuse(reader, "table '" + table.name + "' has " + std::to_string(ids->shape[0]) +
                       " rows for " + std::to_string(store.num_ids(draft.number(), t)) + " ids");
  }
  if (!table.trains_unknown || store.unknown() == UnknownIds::kZero) return;
  const TensorInfo& unknown = fitting(reader, name + kUnknownSuffix, {1, table.num_columns});
  std::vector<float> numbers = read_numbers(reader, unknown, 0, 1);
  write_row(reader, table, numbers, draft.unknown_row(t), "the row of unknown ids");
}

}  // namespace

UpdateReport write_update(const checkpoint::Reader& reader, const Store& store,
                          Store::Draft& draft) {
  const ModelInfo& model = store.model();
  const PublishedRows published(reader, store.version(store.current()).source.data());

  std::map<std::string, std::vector<float>> dense;
  for (const auto& [name, shape] : dense_tensors(model)) {
    const TensorInfo& tensor = fitting(reader, kDensePrefix + name, shape);
    std::vector<float> numbers = read_numbers(reader, tensor, 0, shape[0]);
    for (const float x : numbers) {
      if (!std::isfinite(x)) refuse(reader, "'" + name + "' holds a number that is not finite");
    }
    dense.emplace(name, std::move(numbers));
  }
  store.plan().pack([&](const std::string& name) { return std::span<const float>(dense.at(name)); },
                    draft.dense());

  for (std::size_t t = 0; t < model.tables.size(); ++t) {
    const TableInfo& table = model.tables[t];
    const std::string name = kTablePrefix + table.name;
    if (table.is_growing) {
      write_ids(reader, published, store, t, draft);
      continue;
    }
    const TensorInfo& tensor =
        fitting(reader, name + kWeightSuffix, {table.num_rows, table.num_columns});
    published.each_row(tensor, [&](std::int64_t row, std::span<float> numbers) {
      write_row(reader, table, numbers, draft.row(t, row), "row " + std::to_string(row));
    });
  }
  return {reader.manifest().step, draft.num_rows(), !published.is_chain()};
}

}  // namespace tessera::serving
