#include "tessera/planner/explain.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <set>

#include "planner/json.h"
#include "planner/places.h"

namespace tessera::planner {
namespace {

using json::Json;
using json::Place;

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
std::string format(const char* pattern, ...) {
  char text[512];
  va_list values;
  va_start(values, pattern);
  std::vsnprintf(text, sizeof text, pattern, values);
  va_end(values);
  return text;
}

std::string time_text(double seconds) {
  if (seconds >= 1) return format("%.4g s", seconds);
  if (seconds >= 1e-3) return format("%.4g ms", seconds * 1e3);
  return format("%.4g us", seconds * 1e6);
}

std::string count_text(double count) {
  if (count >= 1e9) return format("%.3gG", count / 1e9);
  if (count >= 1e6) return format("%.3gM", count / 1e6);
  if (count >= 1e4) return format("%.3gk", count / 1e3);
  return format("%.0f", count);
}

std::string fitted(const std::string& text, std::size_t width) {
  if (text.size() <= width) return text;
  return text.substr(0, width - 2) + "..";
}

// "3", "0-7", "0,2,5", "0,2,5,…"
std::string ranks_text(const std::vector<Shard>& shards) {
  std::set<int> ranks;
  for (const Shard& shard : shards) {
    if (shard.rows > 0) ranks.insert(shard.rank);
  }
  std::string text;
  for (auto first = ranks.begin(); first != ranks.end();) {
    auto last = first;
    auto next = std::next(first);
    while (next != ranks.end() && *next == *last + 1) last = next++;
    text += (text.empty() ? "" : ",") + std::to_string(*first);
    if (*last > *first) text += "-" + std::to_string(*last);
    first = next;
  }
  return text;
}

std::string way_text(const Reason& reason) {
  std::string text(name_of(reason.next_best));
  if (reason.next_best == Cut::kDataParallel) {
    text += reason.next_kernel == Kernel::kDense ? " (dense)" : " (fused)";
  }
  return text;
}

std::string dearer_text(double share) {
  return share < 0       ? format("%.1f %% less", -100 * share)
         : share < 9.995 ? format("%.1f %% more", 100 * share)
                         : format("%.0f times as much", share + 1);
}

std::map<std::string_view, const Table*> by_name(const Problem& problem) {
  std::map<std::string_view, const Table*> tables;
  for (const Table& table : problem.tables) tables[table.name] = &table;
  return tables;
}

double ids_of(const Table& table) {
  double ids = 0;
  for (const Feature& feature : table.features) ids += feature.ids;
  return ids;
}

Json seconds_value(const Seconds& seconds) {
  return {{"ids", seconds.ids},         {"lookup", seconds.lookup}, {"rows", seconds.rows},
          {"grads", seconds.gradients}, {"step", seconds.step},     {"total", seconds.total()}};
}

Json bytes_value(const Bytes& bytes) {
  return {{"weights", bytes.weights}, {"optimizer", bytes.optimizer},
          {"input", bytes.input},     {"activations", bytes.activations},
          {"sort", bytes.sort},       {"total", bytes.total()}};
}

Json limit_value(double bytes) { return bytes == kNoLimit ? Json() : Json(bytes); }

// Seconds of all ranks together, by part.
Seconds total_of(const std::vector<ShardCost>& costs) {
  Seconds sum;
  for (const ShardCost& cost : costs) {
    sum.ids += cost.seconds.ids;
    sum.lookup += cost.seconds.lookup;
    sum.rows += cost.seconds.rows;
    sum.gradients += cost.seconds.gradients;
    sum.step += cost.seconds.step;
  }
  return sum;
}

// What rules cost, where the best of all plans without them may be much faster.
std::string rules_text(const Problem& problem, const PlanResult& result) {
  constexpr double kMuch = 0.02;
  constexpr std::size_t kMostRules = 64;
  std::string text;
  if (problem.rules.size() > kMostRules || !(result.certificate.seconds > 0)) return text;
  if (problem.rules.empty() && problem.apart.empty() && problem.together.empty()) return text;
  const double with = lower_bound(enumerate(problem)).certificate.seconds;
  const auto consider = [&](const std::string& what, const Problem& without) {
    const double least = lower_bound(enumerate(without)).certificate.seconds;
    const double saved = 1 - least / with;
    if (saved > kMuch) {
      text +=
          format("rules    without %s up to %.1f %% less\n", fitted(what, 60).c_str(), 100 * saved);
    }
  };
  for (const auto& [name, rules] : problem.rules) {
    Problem without = problem;
    without.rules.erase(name);
    consider("those of '" + name + "'", without);
  }
  if (!problem.apart.empty() || !problem.together.empty()) {
    Problem without = problem;
    without.apart.clear();
    without.together.clear();
    consider("tables that lie apart or together", without);
  }
  return text;
}

std::string dump(const Json& value) {
  try {
    return value.dump(1);
  } catch (const Json::type_error&) {
    throw PlanError(PlanErrorKind::kBadProblem, "plan: the name of a table is not UTF-8");
  }
}

}  // namespace

std::string to_json(const Problem& problem, const PlanResult& result) {
  const auto tables = by_name(problem);
  Json prices = Json::array();
  for (const Price& price : result.certificate.prices) {
    prices.push_back({{"ranks", price.num_ranks},
                      {"capacity", limit_value(price.capacity)},
                      {"second", price.second},
                      {"byte", price.byte}});
  }
  Json certificate{{"seconds", result.certificate.seconds},
                   {"table", result.certificate.table},
                   {"prices", std::move(prices)}};
  for (const PhasePrices& piece : result.certificate.phases) {
    certificate["phases"].push_back({{"from", piece.from},
                                     {"to", piece.to},
                                     {"links", piece.links},
                                     {"local", piece.local},
                                     {"byte", piece.byte}});
  }
  if (!result.certificate.pays.tables.empty()) {
    Json pays = Json::array();
    for (const TablePay& pay : result.certificate.pays.tables) {
      pays.push_back({{"table", pay.table}, {"share", pay.share}, {"part", pay.part}});
    }
    certificate["pays"] = {{"byte", result.certificate.pays.byte}, {"tables", std::move(pays)}};
  }
  Json list = Json::array();
  for (std::size_t t = 0; t < result.plan.size(); ++t) {
    const TablePlan& one = result.plan[t];
    const Table& table = *tables.at(one.name);
    Json shards = Json::array();
    for (const Shard& s : one.shards) {
      shards.push_back({s.row, s.column, s.rows, s.columns, s.rank});
    }
    Json value{{"name", one.name},           {"rows", table.rows},
               {"dim", table.dim},           {"ids", ids_of(table)},
               {"type", name_of(one.cut)},   {"kernel", name_of(one.kernel)},
               {"shards", std::move(shards)}};
    if (t < result.reasons.size() && result.reasons[t].has_next) {
      value["next_best"] = {{"type", name_of(result.reasons[t].next_best)},
                            {"kernel", name_of(result.reasons[t].next_kernel)},
                            {"dearer", result.reasons[t].dearer}};
    }
    list.push_back(std::move(value));
  }
  Json ranks = Json::array();
  for (std::size_t r = 0; r < result.per_rank.size(); ++r) {
    ranks.push_back({{"seconds", seconds_value(result.per_rank[r].seconds)},
                     {"bytes", bytes_value(result.per_rank[r].bytes)},
                     {"capacity", limit_value(result.capacities[r])}});
  }
  Json all{{"version", 2},
           {"objective", problem.objective == Objective::kSum ? "sum" : "phases"},
           {"plan_seconds", result.seconds},
           {"bound_seconds", result.certificate.seconds},
           {"gap", result.gap()},
           {"tries", result.tries},
           {"certificate", std::move(certificate)},
           {"tables", std::move(list)},
           {"per_rank", std::move(ranks)}};
  if (result.is_cut_short) all["cut_short"] = true;
  return dump(all);
}

PlanResult result_from_json(std::string_view text) {
  const Json value = json::parse(text, "the plan");
  const Place root(value, "");
  PlanResult result;
  root["version"].whole(2, 2);
  result.seconds = root["plan_seconds"].number(0, 1e12);
  const Place certificate = root["certificate"];
  certificate.check_keys({"seconds", "table", "prices", "phases", "pays"});
  result.certificate.seconds = certificate["seconds"].number(0, 1e12);
  result.certificate.table = certificate["table"].text();
  const Place prices = certificate["prices"];
  for (std::size_t i = 0; i < prices.size(); ++i) {
    const Place one = prices[i];
    one.check_keys({"ranks", "capacity", "second", "byte"});
    Price price;
    price.num_ranks = static_cast<int>(one["ranks"].whole(1, 1 << 16));
    price.capacity =
        one["capacity"].value().is_null() ? kNoLimit : one["capacity"].number(-1e18, 1e18);
    price.second = one["second"].number(0, 1e12);
    price.byte = one["byte"].number(0, 1e12);
    result.certificate.prices.push_back(price);
  }
  for (std::size_t i = 0; certificate.has("phases") && i < certificate["phases"].size(); ++i) {
    const Place one = certificate["phases"][i];
    one.check_keys({"from", "to", "links", "local", "byte"});
    result.certificate.phases.push_back({one["from"].number(0, 1e12), one["to"].number(0, 1e12),
                                         one["links"].number(0, 1e12), one["local"].number(0, 1e12),
                                         one["byte"].number(0, 1e12)});
  }
  if (certificate.has("pays")) {
    const Place pays = certificate["pays"];
    pays.check_keys({"byte", "tables"});
    result.certificate.pays.byte = pays["byte"].number(0, 1e12);
    for (std::size_t i = 0; i < pays["tables"].size(); ++i) {
      const Place one = pays["tables"][i];
      one.check_keys({"table", "share", "part"});
      result.certificate.pays.tables.push_back(
          {one["table"].text(), one["share"].number(0, 1e12), one["part"].number(0, 1e12)});
    }
  }
  const Place tables = root["tables"];
  constexpr std::int64_t kMost = std::int64_t{1} << 44;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const Place one = tables[t];
    TablePlan plan;
    plan.name = one["name"].text();
    try {
      plan.cut = cut_of(one["type"].text());
      plan.kernel = kernel_of(one["kernel"].text());
    } catch (const PlanError& error) {
      one.refuse("has an unknown type or kernel");
    }
    const Place shards = one["shards"];
    for (std::size_t s = 0; s < shards.size(); ++s) {
      const Place shard = shards[s];
      if (shard.size() != 5) shard.refuse("is not [row, column, rows, columns, rank]");
      const auto number = [&](std::size_t i) { return shard[i].whole(0, kMost); };
      plan.shards.push_back({number(0), number(1), number(2), number(3),
                             static_cast<int>(shard[std::size_t{4}].whole(0, 1 << 16))});
    }
    Reason& reason = result.reasons.emplace_back();
    if (one.has("next_best")) {
      const Place next = one["next_best"];
      next.check_keys({"type", "kernel", "dearer"});
      try {
        reason = {cut_of(next["type"].text()), kernel_of(next["kernel"].text()), true,
                  next["dearer"].number(-1e12, 1e12)};
      } catch (const PlanError& error) {
        next.refuse("has an unknown type or kernel");
      }
    }
    result.plan.push_back(std::move(plan));
  }
  if (root.has("tries")) result.tries = static_cast<int>(root["tries"].whole(0, 1 << 30));
  if (root.has("cut_short")) result.is_cut_short = root["cut_short"].flag();
  return result;
}

PlanResult result_from_json(std::string_view text, const Problem& problem) {
  PlanResult result = result_from_json(text);
  check_plan(problem, result.plan);
  result.per_rank = cost_of(problem, result.plan);
  result.seconds = step_seconds(problem, result.per_rank);
  const CostModel model(problem);
  for (int r = 0; r < problem.num_ranks(); ++r) result.capacities.push_back(model.capacity(r));
  return result;
}

std::string plan_json(const Plan& plan, const std::string& module) {
  Json tables = Json::object();
  for (const TablePlan& one : plan) {
    Json shards = Json::array();
    Json ranks = Json::array();
    for (const Shard& s : one.shards) {
      shards.push_back({s.row, s.column, s.rows, s.columns, s.rank});
      ranks.push_back(s.rank);
    }
    tables[one.name] = {{"type", name_of(one.cut)},
                        {"kernel", name_of(one.kernel)},
                        {"ranks", std::move(ranks)},
                        {"shards", std::move(shards)}};
  }
  return dump({{"version", 1}, {"modules", {{module, std::move(tables)}}}});
}

std::string summary(const Problem& problem, const PlanResult& result) {
  const Seconds total = total_of(result.per_rank);
  const std::pair<const char*, double> parts[] = {{"ids on the links", total.ids},
                                                  {"lookups", total.lookup},
                                                  {"rows on the links", total.rows},
                                                  {"gradients on the links", total.gradients},
                                                  {"table steps", total.step}};
  const auto* most = std::max_element(std::begin(parts), std::end(parts),
                                      [](auto& a, auto& b) { return a.second < b.second; });
  std::string text = "plan     " + time_text(result.seconds) + " a step, no plan can be under " +
                     time_text(result.certificate.seconds) +
                     format(" (%.2f %%)", 100 * result.gap());
  if (problem.objective == Objective::kPhases) text += ", links and memory each waited for";
  if (result.is_cut_short) text += "; cut short";
  text += "\n";
  std::size_t fullest = 0;
  double share = -1;
  for (std::size_t r = 0; r < result.per_rank.size(); ++r) {
    const double bytes = result.per_rank[r].bytes.total();
    const double full = result.capacities[r] == kNoLimit
                            ? bytes * 1e-30
                            : bytes / std::max(1.0, result.capacities[r]);
    if (full <= share) continue;
    share = full;
    fullest = r;
  }
  if (total.total() > 0) {
    text += format("mostly   %s (%.0f %%)\n", most->first, 100 * most->second / total.total());
  }
  text += format("memory   rank %zu is fullest: %s", fullest,
                 bytes_text(result.per_rank[fullest].bytes.total()).c_str());
  if (result.capacities[fullest] != kNoLimit) {
    text += " of " + bytes_text(result.capacities[fullest]) + " for tables";
  }
  // What memory is worth at the prices of the bound.
  double worth = 0;
  for (const Price& price : result.certificate.prices) {
    if (price.byte > 0) worth += price.byte * price.capacity * price.num_ranks;
  }
  if (worth > 0 && result.certificate.seconds > 0) {
    text +=
        format("; 1 %% more memory would save up to %.2g %%", worth / result.certificate.seconds);
  } else if (result.capacities[fullest] != kNoLimit) {
    text += "; more memory would save nothing";
  }
  return text + "\n" + rules_text(problem, result);
}

std::string explain(const Problem& problem, const PlanResult& result, const std::string& name) {
  for (std::size_t t = 0; t < result.plan.size(); ++t) {
    const TablePlan& one = result.plan[t];
    if (one.name != name) continue;
    const Table& table = *by_name(problem).at(name);
    const CostModel model(problem);
    const CostModel::TableLoad load = model.load_of(table);
    Seconds sum;
    double bytes = 0;
    double widest = 0;
    for (const Shard& shard : one.shards) {
      const ShardCost cost = model.cost(table, load, one.cut, one.kernel, shard.rows, shard.columns,
                                        shard.rank, shard.row);
      sum = {sum.ids + cost.seconds.ids, sum.lookup + cost.seconds.lookup,
             sum.rows + cost.seconds.rows, sum.gradients + cost.seconds.gradients,
             sum.step + cost.seconds.step};
      bytes += cost.bytes.total();
      widest = std::max(widest, cost.seconds.total());
    }
    const double whole =
        model.cost(table, load, Cut::kTableWise, Kernel::kFused, table.rows, table.dim, 0)
            .seconds.total();
    std::string text = fitted(name, 40) + " (" + count_text(static_cast<double>(table.rows)) +
                       " x " + std::to_string(table.dim) +
                       format(", %g ids a sample)", ids_of(table)) + ": " +
                       std::string(name_of(one.cut)) + "\n";
    text += "  where  ranks " + fitted(ranks_text(one.shards), 70) + ", " +
            std::to_string(one.shards.size()) + (one.shards.size() == 1 ? " shard" : " shards") +
            ", " + bytes_text(bytes) + " in all\n";
    text += "  costs  " + time_text(sum.total()) + " on all ranks: ids " + time_text(sum.ids) +
            ", lookup " + time_text(sum.lookup) + ", rows " + time_text(sum.rows + sum.gradients) +
            ", step " + time_text(sum.step) + "\n";
    text += format("  why    whole it needs %.2f of a rank's time; its largest shard needs %.2f\n",
                   result.seconds > 0 ? whole / result.seconds : 0.0,
                   result.seconds > 0 ? widest / result.seconds : 0.0);
    if (t < result.reasons.size() && result.reasons[t].has_next) {
      const Reason& reason = result.reasons[t];
      text += "  next   " + way_text(reason) + " would cost " + dearer_text(reason.dearer);
      if (reason.dearer < 0) text += ", but evens out the ranks less";
      text += "\n";
    } else {
      text += "  next   no other way is allowed and fits\n";
    }
    return text;
  }
  throw PlanError(PlanErrorKind::kBadProblem, "plan: there is no table '" + name + "'",
                  "there are " + std::to_string(result.plan.size()) + ", the first is '" +
                      (result.plan.empty() ? "" : result.plan[0].name) + "'");
}

std::string table_text(const Problem& problem, const PlanResult& result) {
  const auto tables = by_name(problem);
  std::string text = format("%-22s %7s %5s %6s  %-17s %-13s %s\n", "table", "rows", "dim", "ids",
                            "cut", "ranks", "next best");
  for (std::size_t t = 0; t < result.plan.size(); ++t) {
    const TablePlan& one = result.plan[t];
    const Table& table = *tables.at(one.name);
    const Reason& reason = result.reasons[t];
    text += format(
        "%-22s %7s %5lld %6.4g  %-17s %-13s %s\n", fitted(one.name, 22).c_str(),
        count_text(static_cast<double>(table.rows)).c_str(), static_cast<long long>(table.dim),
        ids_of(table), std::string(name_of(one.cut)).c_str(),
        fitted(ranks_text(one.shards), 13).c_str(),
        reason.has_next ? fitted(std::string(name_of(reason.next_best)) +
                                     format(" %+.0f %%", 100 * std::min(reason.dearer, 99.0)),
                                 23)
                              .c_str()
                        : "-");
  }
  text += format("\n%-6s %11s %11s %10s %10s %10s %10s %10s\n", "rank", "bytes", "step ms", "ids",
                 "lookup", "rows", "grads", "table step");
  for (std::size_t r = 0; r < result.per_rank.size(); ++r) {
    const ShardCost& cost = result.per_rank[r];
    const Seconds& s = cost.seconds;
    text += format("%-6zu %11s %11.4g %10.4g %10.4g %10.4g %10.4g %10.4g\n", r,
                   bytes_text(cost.bytes.total()).c_str(), 1e3 * s.total(), 1e3 * s.ids,
                   1e3 * s.lookup, 1e3 * s.rows, 1e3 * s.gradients, 1e3 * s.step);
  }
  return text;
}

}  // namespace tessera::planner
