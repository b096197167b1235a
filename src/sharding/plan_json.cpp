#include <initializer_list>
#include <limits>
#include <set>
#include <string>

#include <nlohmann/json.hpp>

#include "tessera/core/check.h"
#include "tessera/sharding/plan.h"

namespace tessera::sharding {
namespace {

using nlohmann::json;

constexpr const char* kFromJson = "sharding.plan_from_json";
constexpr std::int64_t kVersion = 1;

template <class... Words>
[[noreturn]] void refuse(const std::string& path, const Words&... words) {
  TESSERA_CHECK_VALUE(false, kFromJson, ": ", path.empty() ? std::string("/") : path, " ",
                      words...);
}

// Parses, and refuses a key twice in one object.
json parse(std::string_view text) {
  std::vector<std::set<std::string>> keys;
  const auto watch = [&](int, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      TESSERA_CHECK_VALUE(keys.back().insert(key).second, kFromJson, ": an object has the key '",
                          key, "' twice.");
    }
    return true;
  };
  try {
    return json::parse(text, watch);
  } catch (const json::parse_error& error) {
    TESSERA_CHECK_VALUE(false, kFromJson, ": the text is not JSON at byte ", error.byte, ".");
  }
}

const json& object_at(const json& value, const std::string& path) {
  if (!value.is_object()) refuse(path, "is ", value.type_name(), ", not an object.");
  return value;
}

const json& array_at(const json& value, const std::string& path) {
  if (!value.is_array()) refuse(path, "is ", value.type_name(), ", not an array.");
  return value;
}

void check_keys(const json& object, std::initializer_list<const char*> known,
                const std::string& path) {
  for (const char* key : known) {
    if (!object.contains(key)) refuse(path + "/" + key, "is missing.");
  }
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      refuse(path + "/" + key, "is unknown.");
    }
  }
}

std::int64_t count_at(const json& value, const std::string& path, std::int64_t limit) {
  constexpr auto kWhole = json::value_t::number_integer;
  const bool is_whole = value.type() == kWhole || value.is_number_unsigned();
  if (!is_whole) refuse(path, "is ", value.dump(), ", not a whole number.");
  const bool fits = value.is_number_unsigned()
                        ? value.get<std::uint64_t>() <= static_cast<std::uint64_t>(limit)
                        : value.get<std::int64_t>() >= 0 && value.get<std::int64_t>() <= limit;
  if (!fits) refuse(path, "is ", value.dump(), ", not within 0 and ", limit, ".");
  return value.get<std::int64_t>();
}

int rank_at(const json& value, const std::string& path) {
  return static_cast<int>(count_at(value, path, std::numeric_limits<int>::max()));
}

template <class Find>
auto name_at(const json& value, const std::string& path, Find find) {
  if (!value.is_string()) refuse(path, "is ", value.type_name(), ", not a string.");
  try {
    return find(value.get_ref<const std::string&>());
  } catch (const c10::ValueError&) {
    refuse(path, "is ", value.dump(), ", which is unknown.");
  }
}

Shard shard_at(const json& value, const std::string& path) {
  const json& numbers = array_at(value, path);
  if (numbers.size() != 5) {
    refuse(path, "has ", numbers.size(), " numbers, not 5: row, column, rows, columns, rank.");
  }
  const auto count = [&](std::size_t i) {
    return count_at(numbers[i], path + "/" + std::to_string(i),
                    std::numeric_limits<std::int64_t>::max());
  };
  return {count(0), count(1), count(2), count(3), rank_at(numbers[4], path + "/4")};
}

ParameterSharding sharding_at(const json& value, const std::string& path) {
  check_keys(object_at(value, path), {"type", "kernel", "ranks", "shards"}, path);
  ParameterSharding sharding;
  sharding.type = name_at(value["type"], path + "/type", sharding_type_of);
  sharding.kernel = name_at(value["kernel"], path + "/kernel", compute_kernel_of);
  const auto walk = [&](const char* key, auto add) {
    const std::string list = path + "/" + key;
    std::size_t place = 0;
    for (const json& entry : array_at(value[key], list)) {
      add(entry, list + "/" + std::to_string(place++));
    }
  };
  walk("ranks", [&](const json& entry, const std::string& where) {
    sharding.ranks.push_back(rank_at(entry, where));
  });
  walk("shards", [&](const json& entry, const std::string& where) {
    sharding.shards.push_back(shard_at(entry, where));
  });
  return sharding;
}

json to_value(const ParameterSharding& sharding) {
  json shards = json::array();
  for (const Shard& shard : sharding.shards) {
    shards.push_back({shard.row, shard.column, shard.rows, shard.columns, shard.rank});
  }
  return {{"type", name_of(sharding.type)},
          {"kernel", name_of(sharding.kernel)},
          {"ranks", sharding.ranks},
          {"shards", std::move(shards)}};
}

}  // namespace

std::string to_json(const ShardingPlan& plan) {
  json modules = json::object();
  for (const auto& [path, tables] : plan.modules) {
    json& module = modules[path] = json::object();
    for (const auto& [name, sharding] : tables) module[name] = to_value(sharding);
  }
  try {
    return json{{"version", kVersion}, {"modules", std::move(modules)}}.dump(2);
  } catch (const json::type_error&) {
    TESSERA_CHECK_VALUE(false, "sharding.to_json: the name of a module or table is not UTF-8.");
  }
}

ShardingPlan plan_from_json(std::string_view text) {
  const json root = parse(text);
  check_keys(object_at(root, ""), {"version", "modules"}, "");
  const std::int64_t version =
      count_at(root["version"], "/version", std::numeric_limits<std::int64_t>::max());
  if (version != kVersion)
    refuse("/version", "is ", version, "; this library reads ", kVersion, ".");
  ShardingPlan plan;
  for (const auto& [path, tables] : object_at(root["modules"], "/modules").items()) {
    const std::string where = "/modules/" + path;
    ModulePlan& module = plan.modules[path];
    for (const auto& [name, sharding] : object_at(tables, where).items()) {
      module.emplace(name, sharding_at(sharding, where + "/" + name));
    }
  }
  return plan;
}

}  // namespace tessera::sharding
