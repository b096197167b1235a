#include "serving/update.h"

#include <cmath>
#include <map>

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
    const TensorInfo& tensor = fitting(reader, kTablePrefix + table.name + kWeightSuffix,
                                       {table.num_rows, table.num_columns});
    published.each_row(tensor, [&](std::int64_t row, std::span<float> numbers) {
      const auto faults = embedding::quantise_row(table.type, numbers, draft.row(t, row));
      if (!faults.has_nan && !faults.is_overflow) return;
      refuse(reader,
             "row " + std::to_string(row) + " of table '" + table.name + "' " +
                 (faults.has_nan ? "holds a NaN"
                                 : "holds numbers that " +
                                       std::string(embedding::name_of(table.type)) + " cannot"));
    });
  }
  return {reader.manifest().step, draft.num_rows(), !published.is_chain()};
}

}  // namespace tessera::serving
