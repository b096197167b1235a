#include "listed_tables.h"

#include "planner/json.h"

namespace tessera::cli {
namespace {

using planner::json::Place;

planner::Table listed_table(const Place& place) {
  place.check_keys({"name", "rows", "dim", "dtype", "pooling", "ids"});
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  planner::Table table;
  table.name = place["name"].text();
  table.rows = place["rows"].whole(1, kMost);
  table.dim = place["dim"].whole(1, 1 << 16);
  if (place.has("dtype")) {
    const std::string& name = place["dtype"].text();
    if (name != "FP32" && name != "FP16" && name != "BF16") {
      place["dtype"].refuse("is '" + name + "'; there are FP32, FP16 and BF16");
    }
    table.element_bytes = name == "FP32" ? 4 : 2;
  }
  if (place.has("pooling")) {
    const std::string& name = place["pooling"].text();
    if (name != "SUM" && name != "MEAN" && name != "NONE") {
      place["pooling"].refuse("is '" + name + "'; there are SUM, MEAN and NONE");
    }
    table.is_pooled = name != "NONE";
  }
  if (place.has("ids")) table.features[0].ids = place["ids"].number(1e-9, 1e6);
  return table;
}

}  // namespace

std::vector<planner::Table> listed_tables(std::string_view text, const std::string& name) {
  const planner::json::Json file = planner::json::parse(text, name);
  const Place list = Place(file, "")["tables"];
  std::vector<planner::Table> tables;
  for (std::size_t i = 0; i < list.size(); ++i) tables.push_back(listed_table(list[i]));
  return tables;
}

}  // namespace tessera::cli
