#include "worker/table_list.h"

#include <nlohmann/json.hpp>

#include "report/run_folder.h"
#include "tessera/core/check.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kMost = std::int64_t{1} << 40;

std::int64_t whole_number(const Json& table, const char* key, const std::string& where) {
  TESSERA_CHECK_VALUE(table.contains(key), where, " has no '", key, "'.");
  const Json& value = table[key];
  TESSERA_CHECK_VALUE(value.is_number_integer() && value >= 1 && value <= kMost, where, ": '", key,
                      "' is ", value.dump(), ", which is not a whole number from 1 to ", kMost,
                      ".");
  return value.get<std::int64_t>();
}

template <class Type>
Type named(const Json& table, const char* key, const std::string& where,
           std::initializer_list<Type> types) {
  if (!table.contains(key)) return *types.begin();
  std::string known;
  for (const Type type : types) {
    const std::string name(embedding::name_of(type));
    if (table[key] == name) return type;
    known += (known.empty() ? "" : ", ") + name;
  }
  TESSERA_CHECK_VALUE(false, where, ": '", key, "' is ", table[key].dump(), "; there are ", known,
                      ".");
}

void add_table(const Json& table, const std::string& where, ListedTables& listed) {
  using embedding::DataType;
  using embedding::PoolingType;
  TESSERA_CHECK_VALUE(table.is_object(), where, " is not an object.");
  for (const auto& [key, value] : table.items()) {
    const bool is_known = key == "name" || key == "rows" || key == "dim" || key == "dtype" ||
                          key == "pooling" || key == "ids";
    TESSERA_CHECK_VALUE(is_known, where, " has an unknown key '", key,
                        "'; there are name, rows, dim, dtype, pooling and ids.");
  }
  TESSERA_CHECK_VALUE(table.contains("name") && table["name"].is_string(), where,
                      " has no 'name' that is a text.");
  embedding::EmbeddingTableConfig config;
  config.name = table["name"].get<std::string>();
  config.num_embeddings = whole_number(table, "rows", where);
  config.embedding_dim = whole_number(table, "dim", where);
  config.data_type =
      named(table, "dtype", where, {DataType::kFP32, DataType::kFP16, DataType::kBF16});
  config.pooling =
      named(table, "pooling", where, {PoolingType::kSum, PoolingType::kMean, PoolingType::kNone});
  const Json ids = table.contains("ids") ? table["ids"] : Json(1);
  TESSERA_CHECK_VALUE(ids.is_number() && ids > 0 && ids <= 1e6, where, ": 'ids' is ", ids.dump(),
                      ", which is no number of ids per sample.");
  listed.tables.push_back(std::move(config));
  listed.ids_per_sample.push_back(ids.get<double>());
}

}  // namespace

ListedTables read_table_list(const std::string& path) {
  const Json file = Json::parse(workloads::report::read_text(path), nullptr, false);
  TESSERA_CHECK_VALUE(file.is_object() && file.contains("tables") && file["tables"].is_array() &&
                          !file["tables"].empty(),
                      "plan: ", path, " is not JSON with a list 'tables'.");
  ListedTables listed;
  std::size_t index = 0;
  for (const Json& table : file["tables"]) {
    add_table(table, "plan: " + path + ", tables[" + std::to_string(index++) + "]", listed);
  }
  embedding::check_tables("plan: " + path, listed.tables);
  return listed;
}

}  // namespace tessera::cli
