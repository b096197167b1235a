#include "planner/json.h"
#include "tessera/planner/plan_error.h"
#include "tessera/planner/problem.h"

namespace tessera::planner {
namespace {

using json::Json;
using json::Place;

constexpr std::int64_t kMost = std::int64_t{1} << 44;

template <class Read>
void read_list(const Place& list, Read read) {
  for (std::size_t i = 0; i < list.size(); ++i) read(list[i]);
}

// A mistake in a name, at its place.
template <class Find>
auto named(const Place& place, Find find) {
  try {
    return find(place.text());
  } catch (const PlanError&) {
    place.refuse("is " + place.value().dump() + ", which is unknown");
  }
}

Feature feature_at(const Place& place) {
  place.check_keys({"ids", "weighted", "distinct"});
  Feature feature;
  if (place.has("ids")) feature.ids = place["ids"].number(0, 1e6);
  if (place.has("weighted")) feature.is_weighted = place["weighted"].flag();
  if (place.has("distinct")) {
    read_list(place["distinct"], [&](const Place& point) {
      if (point.size() != 2) point.refuse("is not [lookups, distinct ids]");
      feature.distinct.emplace_back(point[std::size_t{0}].number(1, 1e18),
                                    point[std::size_t{1}].number(0, 1e18));
    });
  }
  return feature;
}

Table table_at(const Place& place) {
  place.check_keys({"name", "rows", "dim", "element_bytes", "pooled", "features",
                    "state_bytes_per_row", "state_bytes_per_element", "exact_norms", "ids_below"});
  Table table;
  table.name = place["name"].text();
  table.rows = place["rows"].whole(1, kMost);
  table.dim = place["dim"].whole(1, 1 << 16);
  if (place.has("element_bytes")) table.element_bytes = place["element_bytes"].number(0.25, 16);
  if (place.has("pooled")) table.is_pooled = place["pooled"].flag();
  if (place.has("features")) {
    table.features.clear();
    read_list(place["features"],
              [&](const Place& one) { table.features.push_back(feature_at(one)); });
  }
  if (place.has("state_bytes_per_row")) {
    table.state_bytes_per_row = place["state_bytes_per_row"].number(0, 1e6);
  }
  if (place.has("exact_norms")) table.has_exact_norms = place["exact_norms"].flag();
  if (place.has("ids_below")) {
    read_list(place["ids_below"], [&](const Place& point) {
      if (point.size() != 2) point.refuse("is not [row, share of the ids below it]");
      table.ids_below.emplace_back(point[std::size_t{0}].number(0, 1e15),
                                   point[std::size_t{1}].number(0, 1));
    });
  }
  if (place.has("state_bytes_per_element")) {
    table.state_bytes_per_element = place["state_bytes_per_element"].number(0, 1e3);
  }
  return table;
}

TableRules rules_at(const Place& place) {
  place.check_keys({"cuts", "kernels", "min_columns", "ranks"});
  TableRules rules;
  if (place.has("cuts")) {
    read_list(place["cuts"], [&](const Place& one) { rules.cuts.push_back(named(one, cut_of)); });
  }
  if (place.has("kernels")) {
    read_list(place["kernels"],
              [&](const Place& one) { rules.kernels.push_back(named(one, kernel_of)); });
  }
  if (place.has("min_columns")) rules.min_columns = place["min_columns"].whole(0, 1 << 16);
  if (place.has("ranks")) {
    read_list(place["ranks"], [&](const Place& one) {
      rules.ranks.push_back(static_cast<int>(one.whole(0, 1 << 16)));
    });
  }
  return rules;
}

Rank rank_at(const Place& place) {
  place.check_keys({"count", "memory", "memory_speed", "host_speed", "network_speed", "step_speed",
                    "row_seconds", "id_seconds", "part_seconds", "sent_seconds", "cut_seconds",
                    "bag_seconds", "merge_seconds", "merge_byte_seconds"});
  Rank rank;
  if (place.has("memory") && !place["memory"].value().is_null()) {
    rank.memory = place["memory"].number(0, 1e18);
  }
  for (const auto& [key, speed] :
       {std::pair{"memory_speed", &rank.speeds.memory}, std::pair{"host_speed", &rank.speeds.host},
        std::pair{"network_speed", &rank.speeds.network}}) {
    if (place.has(key)) *speed = place[key].number(1, 1e18);
  }
  if (place.has("step_speed")) rank.speeds.step = place["step_speed"].number(0, 1e18);
  for (const auto& [key, seconds] : kSpeedSeconds) {
    if (place.has(key)) rank.speeds.*seconds = place[key].number(0, 1);
  }
  return rank;
}

Json to_value(const Table& table) {
  Json features = Json::array();
  for (const Feature& feature : table.features) {
    Json one{{"ids", feature.ids}};
    if (feature.is_weighted) one["weighted"] = true;
    if (!feature.distinct.empty()) one["distinct"] = feature.distinct;
    features.push_back(std::move(one));
  }
  Json value{{"name", table.name},
             {"rows", table.rows},
             {"dim", table.dim},
             {"element_bytes", table.element_bytes},
             {"pooled", table.is_pooled},
             {"features", std::move(features)},
             {"state_bytes_per_row", table.state_bytes_per_row},
             {"state_bytes_per_element", table.state_bytes_per_element}};
  if (table.has_exact_norms) value["exact_norms"] = true;
  if (!table.ids_below.empty()) value["ids_below"] = table.ids_below;
  return value;
}

}  // namespace

Problem problem_from_json(std::string_view text) {
  const Json value = json::parse(text, "the problem");
  const Place root(value, "");
  root.check_keys({"tables", "rules", "batch", "ranks", "ranks_per_host", "reserved_percent",
                   "reserved_bytes", "objective", "tries", "apart", "together"});
  Problem problem;
  read_list(root["tables"], [&](const Place& one) { problem.tables.push_back(table_at(one)); });
  if (root.has("rules")) {
    const Place rules = root["rules"];
    if (!rules.value().is_object()) rules.refuse("is not an object");
    for (const auto& [name, one] : rules.value().items()) {
      problem.rules[name] = rules_at({one, rules.path() + "/" + name});
    }
  }
  for (const auto& [key, lists] :
       {std::pair{"apart", &problem.apart}, std::pair{"together", &problem.together}}) {
    if (!root.has(key)) continue;
    read_list(root[key], [&, to = lists](const Place& list) {
      read_list(list, [&, &names = to->emplace_back()](const Place& one) {
        names.push_back(one.text());
      });
    });
  }
  problem.batch = root["batch"].whole(1, 1 << 30);
  problem.ranks.clear();
  read_list(root["ranks"], [&](const Place& one) {
    const std::int64_t count = one.has("count") ? one["count"].whole(1, 1 << 16) : 1;
    const Rank rank = rank_at(one);
    if (static_cast<std::int64_t>(problem.ranks.size()) + count > (1 << 16)) {
      one.refuse("makes more than 65536 ranks");
    }
    problem.ranks.insert(problem.ranks.end(), static_cast<std::size_t>(count), rank);
  });
  problem.ranks_per_host = static_cast<int>(problem.ranks.size());
  if (root.has("ranks_per_host")) {
    problem.ranks_per_host = static_cast<int>(root["ranks_per_host"].whole(1, 1 << 16));
  }
  if (root.has("reserved_percent")) {
    problem.reserved_percent = root["reserved_percent"].number(0, 100);
  }
  if (root.has("reserved_bytes")) problem.reserved_bytes = root["reserved_bytes"].number(0, 1e18);
  if (root.has("tries")) problem.tries = static_cast<int>(root["tries"].whole(1, 1'000'000));
  if (root.has("objective")) {
    const std::string& name = root["objective"].text();
    if (name != "sum" && name != "phases") root["objective"].refuse("is neither sum nor phases");
    problem.objective = name == "sum" ? Objective::kSum : Objective::kPhases;
  }
  check(problem);
  return problem;
}

std::string to_json(const Problem& problem) {
  Json tables = Json::array();
  for (const Table& table : problem.tables) tables.push_back(to_value(table));
  Json rules = Json::object();
  for (const auto& [name, one] : problem.rules) {
    Json value = Json::object();
    for (const Cut cut : one.cuts) value["cuts"].push_back(name_of(cut));
    for (const Kernel kernel : one.kernels) value["kernels"].push_back(name_of(kernel));
    if (one.min_columns > 0) value["min_columns"] = one.min_columns;
    if (!one.ranks.empty()) value["ranks"] = one.ranks;
    rules[name] = std::move(value);
  }
  Json ranks = Json::array();
  for (std::size_t r = 0; r < problem.ranks.size();) {
    const Rank& rank = problem.ranks[r];
    std::size_t end = r;
    while (end < problem.ranks.size() && problem.ranks[end] == rank) ++end;
    Json one{{"count", end - r},
             {"memory", rank.memory == kNoLimit ? Json() : Json(rank.memory)},
             {"memory_speed", rank.speeds.memory},
             {"host_speed", rank.speeds.host},
             {"network_speed", rank.speeds.network}};
    if (rank.speeds.step > 0) one["step_speed"] = rank.speeds.step;
    for (const auto& [key, seconds] : kSpeedSeconds) {
      if (rank.speeds.*seconds > 0) one[key] = rank.speeds.*seconds;
    }
    ranks.push_back(std::move(one));
    r = end;
  }
  Json value{{"tables", std::move(tables)},
             {"rules", std::move(rules)},
             {"batch", problem.batch},
             {"ranks", std::move(ranks)},
             {"ranks_per_host", problem.ranks_per_host},
             {"reserved_percent", problem.reserved_percent},
             {"reserved_bytes", problem.reserved_bytes},
             {"objective", problem.objective == Objective::kSum ? "sum" : "phases"},
             {"tries", problem.tries}};
  if (!problem.apart.empty()) value["apart"] = problem.apart;
  if (!problem.together.empty()) value["together"] = problem.together;
  try {
    return value.dump(1);
  } catch (const Json::type_error&) {
    throw PlanError(PlanErrorKind::kBadProblem, "plan: the name of a table is not UTF-8");
  }
}

}  // namespace tessera::planner
