#include "serving/model_info.h"

#include <algorithm>
#include <set>

#include <nlohmann/json.hpp>

#include "checkpoint/json.h"
#include "tessera/checkpoint/error.h"
#include "tessera/collision/id_table.h"

namespace tessera::serving {
namespace {

namespace json = checkpoint::json;
using Json = nlohmann::ordered_json;

constexpr std::int64_t kMostWidth = std::int64_t{1} << 20;
constexpr std::size_t kMostLayers = 64;
constexpr std::size_t kMostFeatures = 255;  // what the interaction can mix

void check(bool is_fine, const std::string& where, const std::string& what) {
  if (!is_fine) json::corrupt(where, what);
}

std::vector<std::int64_t> widths_in(const nlohmann::json& object, const char* key,
                                    const std::string& where) {
  const auto widths = json::counts_of(object, key, where);
  check(widths.size() >= 2 && widths.size() <= kMostLayers, where,
        std::string("has ") + key + " layers that make no sense");
  for (const std::int64_t width : widths) {
    check(width >= 1 && width <= kMostWidth, where,
          std::string("has a layer of ") + std::to_string(width) + " in " + key);
  }
  return widths;
}

const nlohmann::json& list_in(const nlohmann::json& object, const char* key,
                              const std::string& where) {
  const nlohmann::json& list = json::member(object, key, where);
  check(list.is_array() && !list.empty(), where, std::string("its ") + key + " are not a list");
  return list;
}

void add_perceptron(std::vector<std::pair<std::string, std::vector<std::int64_t>>>& tensors,
                    const std::string& name, const std::vector<std::int64_t>& widths) {
  for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
    const std::string layer = name + ".layer_" + std::to_string(i);
    tensors.push_back({layer + ".weight", {widths[i + 1], widths[i]}});
    tensors.push_back({layer + ".bias", {widths[i + 1]}});
  }
}

}  // namespace

std::string encode_model(const ModelInfo& model) {
  Json tables = Json::array();
  for (const TableInfo& table : model.tables) {
    tables.push_back({{"name", table.name},
                      {"type", embedding::name_of(table.type)},
                      {"rows", table.num_rows},
                      {"columns", table.num_columns},
                      {"row_bytes", table.row_bytes}});
    if (!table.is_growing) continue;
    tables.back()["ids"] = collision::kIdHashName;
    tables.back()["unknown"] = table.trains_unknown ? "row" : "zero";
  }
  Json features = Json::array();
  for (const FeatureInfo& feature : model.features) {
    features.push_back({{"name", feature.name},
                        {"table", model.tables.at(feature.table).name},
                        {"pooling", feature.is_mean ? "mean" : "sum"}});
  }
  Json text = {{"version", has_growing(model) ? kGrowingVersion : kPackageVersion},
               {"name", model.name},
               {"step", model.step},
               {"source", model.source},
               {"dense", model.num_dense},
               {"features", features},
               {"tables", tables},
               {"bottom", model.bottom},
               {"interaction", model.interaction == Interaction::kCross ? "cross" : "dot"},
               {"cross_layers", model.cross_layers},
               {"cross_rank", model.cross_rank},
               {"top", model.top},
               {"output", "sigmoid"}};
  if (model.has_half_outputs) text["output_type"] = "fp16";
  return text.dump(1) + "\n";
}

bool has_growing(const ModelInfo& model) {
  return std::any_of(model.tables.begin(), model.tables.end(),
                     [](const TableInfo& table) { return table.is_growing; });
}

std::int64_t most_ids(std::int64_t num_ids) { return 4 * num_ids + (std::int64_t{1} << 20); }

bool has_same_inputs(const ModelInfo& a, const ModelInfo& b) {
  return a.name == b.name && a.num_dense == b.num_dense &&
         a.has_half_outputs == b.has_half_outputs &&
         std::equal(a.features.begin(), a.features.end(), b.features.begin(), b.features.end(),
                    [](const FeatureInfo& x, const FeatureInfo& y) { return x.name == y.name; });
}

std::int64_t mixed_width(const ModelInfo& model) {
  const auto count = static_cast<std::int64_t>(model.features.size());
  const std::int64_t dim = model.bottom.back();
  if (model.interaction == Interaction::kCross) return (count + 1) * dim;
  return dim + count * (count + 1) / 2;
}

std::vector<std::pair<std::string, std::vector<std::int64_t>>> dense_tensors(
    const ModelInfo& model) {
  std::vector<std::pair<std::string, std::vector<std::int64_t>>> tensors;
  add_perceptron(tensors, "bottom", model.bottom);
  const std::int64_t mixed = mixed_width(model);
  for (std::int64_t i = 0; i < model.cross_layers; ++i) {
    const std::string number = std::to_string(i);
    tensors.push_back({"cross.down_" + number + ".weight", {model.cross_rank, mixed}});
    tensors.push_back({"cross.up_" + number + ".weight", {mixed, model.cross_rank}});
    tensors.push_back({"cross.up_" + number + ".bias", {mixed}});
  }
  add_perceptron(tensors, "top", model.top);
  return tensors;
}

ModelInfo decode_model(std::string_view text, const std::string& where) {
  const nlohmann::json object = json::parse_object(text, where, 1'000'000);
  json::check_keys(object,
                   {"version", "name", "step", "source", "dense", "features", "tables", "bottom",
                    "interaction", "cross_layers", "cross_rank", "top", "output", "output_type"},
                   where);
  const std::int64_t version = json::count_of(object, "version", where);
  check(version == kPackageVersion || version == kGrowingVersion, where,
        "is of version " + std::to_string(version) + "; this program reads up to " +
            std::to_string(kGrowingVersion));
  ModelInfo model;
  model.name = json::string_of(object, "name", where);
  model.step = json::count_of(object, "step", where);
  model.source = json::string_of(object, "source", where);
  model.num_dense = json::count_of(object, "dense", where);
  model.bottom = widths_in(object, "bottom", where);
  model.top = widths_in(object, "top", where);
  const std::string interaction = json::string_of(object, "interaction", where);
  check(interaction == "dot" || interaction == "cross", where,
        "has an unknown interaction '" + interaction + "'");
  model.interaction = interaction == "cross" ? Interaction::kCross : Interaction::kDot;
  model.cross_layers = json::count_of(object, "cross_layers", where);
  model.cross_rank = json::count_of(object, "cross_rank", where);
  check(json::string_of(object, "output", where) == "sigmoid", where, "has an unknown output");
  if (object.contains("output_type")) {
    const std::string type = json::string_of(object, "output_type", where);
    check(type == "fp16" || type == "fp32", where, "has outputs of an unknown type '" + type + "'");
    model.has_half_outputs = type == "fp16";
  }

  std::map<std::string, std::size_t> places;
  for (const auto& entry : list_in(object, "tables", where)) {
    check(entry.is_object(), where, "has a table that is not an object");
    json::check_keys(entry, {"name", "type", "rows", "columns", "row_bytes", "ids", "unknown"},
                     where);
    TableInfo table;
    table.name = json::string_of(entry, "name", where);
    const auto type = embedding::row_type_of(json::string_of(entry, "type", where));
    check(type.has_value(), where, "table '" + table.name + "' has an unknown type");
    table.type = *type;
    table.num_rows = json::count_of(entry, "rows", where);
    table.num_columns = json::count_of(entry, "columns", where);
    table.row_bytes = json::count_of(entry, "row_bytes", where);
    table.is_growing = entry.contains("ids");
    check(table.is_growing == entry.contains("unknown"), where,
          "table '" + table.name + "' says half of how it grows");
    if (table.is_growing) {
      const std::string hash = json::string_of(entry, "ids", where);
      check(hash == collision::kIdHashName && version == kGrowingVersion, where,
            "the ids of table '" + table.name + "' are found by '" + hash +
                "'; this program knows " + std::string(collision::kIdHashName));
      const std::string unknown = json::string_of(entry, "unknown", where);
      check(unknown == "row" || unknown == "zero", where,
            "table '" + table.name + "' has unknown ids of an unknown kind");
      table.trains_unknown = unknown == "row";
    }
    check(table.num_columns >= 1 && table.num_columns <= kMostWidth &&
              table.row_bytes >= embedding::row_bytes(table.type, table.num_columns) &&
              table.row_bytes <= 64 + embedding::row_bytes(table.type, table.num_columns),
          where, "table '" + table.name + "' has rows of a width that does not fit its type");
    check(table.num_columns == model.bottom.back(), where,
          "table '" + table.name + "' is not as wide as the bottom layers end");
    check(places.emplace(table.name, model.tables.size()).second, where,
          "has table '" + table.name + "' twice");
    model.tables.push_back(std::move(table));
  }
  std::set<std::string> names;
  for (const auto& entry : list_in(object, "features", where)) {
    check(entry.is_object(), where, "has a feature that is not an object");
    json::check_keys(entry, {"name", "table", "pooling"}, where);
    FeatureInfo feature;
    feature.name = json::string_of(entry, "name", where);
    const std::string table = json::string_of(entry, "table", where);
    const auto place = places.find(table);
    check(place != places.end(), where,
          "feature '" + feature.name + "' names a table '" + table + "' that is not there");
    feature.table = place->second;
    const std::string pooling = json::string_of(entry, "pooling", where);
    check(pooling == "sum" || pooling == "mean", where,
          "feature '" + feature.name + "' has an unknown pooling");
    feature.is_mean = pooling == "mean";
    check(names.insert(feature.name).second, where, "has feature '" + feature.name + "' twice");
    model.features.push_back(std::move(feature));
  }
  const bool is_cross = model.interaction == Interaction::kCross;
  check(model.features.size() <= kMostFeatures, where, "has more than 255 features");
  check(model.num_dense == model.bottom.front() && mixed_width(model) == model.top.front() &&
            model.top.back() == 1,
        where, "has layers that do not fit together");
  check(is_cross ? model.cross_layers >= 1 && model.cross_layers <= 64 && model.cross_rank >= 1 &&
                       model.cross_rank <= kMostWidth
                 : model.cross_layers == 0,
        where, "has cross layers that make no sense");
  return model;
}

}  // namespace tessera::serving
