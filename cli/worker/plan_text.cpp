#include "worker/plan_text.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <numeric>

#include "report/html.h"

namespace tessera::cli {
namespace {

using planner::Seconds;
using sharding::ParameterSharding;
using workloads::report::bytes_text;
using workloads::report::short_number;
using Json = nlohmann::ordered_json;

constexpr std::size_t kMostRanks = 32;  // shown one by one
constexpr std::size_t kNameWidth = 20;
constexpr std::size_t kRanksWidth = 14;

struct Part {
  const char* name;
  double Seconds::* seconds;
};
constexpr Part kParts[] = {{"ids", &Seconds::ids},
                           {"lookup", &Seconds::lookup},
                           {"rows", &Seconds::rows},
                           {"gradients", &Seconds::gradients},
                           {"step", &Seconds::step}};

[[gnu::format(printf, 1, 2)]] std::string line(const char* format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  std::string result = text;
  result.erase(result.find_last_not_of(' ') + 1);
  return result + "\n";
}

std::string cut(const std::string& text, std::size_t width) {
  return text.size() <= width ? text : text.substr(0, width - 2) + "..";
}

std::string counted(int count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

// "0-3" for ranks in a row, else a list.
std::string ranks_text(const ParameterSharding& sharding) {
  const std::vector<int>& ranks = sharding.ranks;
  bool is_row = ranks.size() > 1;
  for (std::size_t i = 1; i < ranks.size(); ++i) is_row &= ranks[i] == ranks[i - 1] + 1;
  if (is_row) return std::to_string(ranks.front()) + "-" + std::to_string(ranks.back());
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return cut(text, kRanksWidth);
}

double largest_shard(const embedding::EmbeddingTableConfig& table,
                     const ParameterSharding& sharding) {
  double most = 0;
  for (const auto& shard : sharding.shards) {
    most = std::max(most, weight_bytes(table, shard));
  }
  return most;
}

std::string tables_text(const PlanSubjectTables& subject) {
  std::string text = line("%-20s %7s %5s %-5s %-7s %-17s %-6s %-14s %s", "table", "rows", "dim",
                          "dtype", "pooling", "cut", "kernel", "ranks", "per shard");
  for (const auto& table : subject.tables) {
    const ParameterSharding& one = subject.chosen.plan.at(table.name);
    text +=
        line("%-20s %7s %5ld %-5s %-7s %-17s %-6s %-14s %s", cut(table.name, kNameWidth).c_str(),
             short_number(static_cast<double>(table.num_embeddings)).c_str(),
             static_cast<long>(table.embedding_dim),
             std::string(embedding::name_of(table.data_type)).c_str(),
             std::string(embedding::name_of(table.pooling)).c_str(),
             std::string(sharding::name_of(one.type)).c_str(),
             std::string(sharding::name_of(one.kernel)).c_str(), ranks_text(one).c_str(),
             bytes_text(largest_shard(table, one)).c_str());
  }
  return text;
}

double milliseconds(double seconds) { return seconds * 1e3; }

std::string ranks_table(const PlanSubjectTables& subject) {
  const std::vector<RankCost>& costs = subject.chosen.costs;
  std::vector<std::size_t> shown(costs.size());
  std::iota(shown.begin(), shown.end(), std::size_t{0});
  if (shown.size() > kMostRanks) {
    std::stable_sort(shown.begin(), shown.end(), [&](std::size_t a, std::size_t b) {
      return costs[a].seconds.total() > costs[b].seconds.total();
    });
    shown.resize(kMostRanks);
  }
  std::string text =
      line("%-5s %8s %8s %8s %8s %5s | %7s %7s %7s %7s %7s %7s", "rank", "weights", "state",
           "batch", "memory", "of it", "ids", "lookup", "rows", "grads", "step", "ms");
  for (const std::size_t rank : shown) {
    const RankCost& cost = costs[rank];
    char share[16] = "";
    if (subject.memory > 0) {
      std::snprintf(share, sizeof(share), "%.0f %%", 100 * cost.bytes.total() / subject.memory);
    }
    const Seconds& time = cost.seconds;
    text += line("%-5zu %8s %8s %8s %8s %5s | %7.3f %7.3f %7.3f %7.3f %7.3f %7.3f", rank,
                 bytes_text(cost.bytes.weights).c_str(), bytes_text(cost.bytes.optimizer).c_str(),
                 bytes_text(cost.bytes.batch).c_str(), bytes_text(cost.bytes.total()).c_str(),
                 share, milliseconds(time.ids), milliseconds(time.lookup), milliseconds(time.rows),
                 milliseconds(time.gradients), milliseconds(time.step), milliseconds(time.total()));
  }
  if (shown.size() < costs.size()) {
    text += line("the %zu slowest of %zu ranks", shown.size(), costs.size());
  }
  return text;
}

double imbalance(const PlanChoice& choice) {
  double sum = 0;
  for (const RankCost& cost : choice.costs) sum += cost.seconds.total();
  return sum == 0 ? 1 : choice.slowest_rank() * static_cast<double>(choice.costs.size()) / sum;
}

// Which rank sets the pace, and with what.
std::string verdict(const PlanSubjectTables& subject) {
  const auto slowest = std::max_element(
      subject.chosen.costs.begin(), subject.chosen.costs.end(),
      [](const RankCost& a, const RankCost& b) { return a.seconds.total() < b.seconds.total(); });
  const Part* most =
      std::max_element(std::begin(kParts), std::end(kParts), [&](const Part& a, const Part& b) {
        return slowest->seconds.*a.seconds < slowest->seconds.*b.seconds;
      });
  const double total = slowest->seconds.total();
  return line("rank %ld is the slowest: %.3f ms, %.2f times the mean, %.0f %% of it %s",
              static_cast<long>(slowest - subject.chosen.costs.begin()), milliseconds(total),
              imbalance(subject.chosen),
              100 * (slowest->seconds.*(most->seconds)) / std::max(1e-30, total), most->name);
}

// How far it is at most from the best plan.
std::string proof(const PlanSubjectTables& subject) {
  const double gap = subject.gap(subject.chosen);
  if (gap < 0) return "";
  return line("plan %.4g ms a step, no plan can be under %.4g ms (%.2f %%)",
              milliseconds(subject.chosen.step_seconds), milliseconds(subject.bound), 100 * gap);
}

std::string comparison(const PlanSubjectTables& subject) {
  std::string text = line("%-14s %12s %13s %9s %10s  %s", "sharding", "largest rank",
                          "slowest rank", "imbalance", "over bound", "fits");
  for (const PlanChoice& other : subject.others) {
    if (!other.obstacle.empty()) {
      text += line("%-14s %12s %13s %9s %10s  no: %s", other.sharding.c_str(), "", "", "", "",
                   cut(other.obstacle, 32).c_str());
      continue;
    }
    char gap[32] = "";
    if (const double share = subject.gap(other); share >= 0) {
      std::snprintf(gap, sizeof(gap), "%.2f %%", 100 * share);
    }
    text += line("%-14s %12s %10.3f ms %9.2f %10s  %s", other.sharding.c_str(),
                 bytes_text(other.largest_rank()).c_str(), milliseconds(other.slowest_rank()),
                 imbalance(other), gap, subject.fits(other) ? "yes" : "no");
  }
  return text;
}

}  // namespace

double PlanChoice::largest_rank() const {
  double most = 0;
  for (const RankCost& cost : costs) most = std::max(most, cost.bytes.total());
  return most;
}

double PlanChoice::slowest_rank() const {
  double most = 0;
  for (const RankCost& cost : costs) most = std::max(most, cost.seconds.total());
  return most;
}

double weight_bytes(const embedding::EmbeddingTableConfig& table, const sharding::Shard& shard) {
  return static_cast<double>(shard.rows) * static_cast<double>(shard.columns) *
         embedding::bits_of(table.data_type) / 8.0;
}

std::string plan_text(const PlanSubjectTables& subject) {
  const planner::Speeds& speeds = subject.problem.ranks[0].speeds;
  double bytes = 0;
  for (const auto& table : subject.tables) {
    bytes += weight_bytes(table, {.rows = table.num_embeddings, .columns = table.embedding_dim});
  }
  std::string text =
      line("tables   %zu of %s on %s of %s, %ld samples per rank; %s", subject.tables.size(),
           bytes_text(bytes).c_str(), counted(subject.topology.world_size, "rank").c_str(),
           counted(subject.topology.num_hosts(), "host").c_str(),
           static_cast<long>(subject.problem.batch), cut(subject.chosen.sharding, 32).c_str());
  text += line("speeds   %.3g GB/s in memory, %.3g in a host, %.3g between hosts; %s",
               speeds.memory / 1e9, speeds.host / 1e9, speeds.network / 1e9,
               subject.speeds_origin.c_str());
  if (subject.memory > 0) {
    text += line("memory   %s a rank, %s of it for tables", bytes_text(subject.memory).c_str(),
                 bytes_text(subject.budget).c_str());
  }
  return text + "\n" + tables_text(subject) + "\n" + ranks_table(subject) + verdict(subject) +
         proof(subject) + "\n" + comparison(subject);
}

Json plan_json(const PlanSubjectTables& subject) {
  const auto or_null = [](double value) { return value < 0 ? Json() : Json(value); };
  const planner::Speeds& speeds = subject.problem.ranks[0].speeds;
  Json tables = Json::array();
  for (std::size_t i = 0; i < subject.tables.size(); ++i) {
    const auto& table = subject.tables[i];
    const ParameterSharding& one = subject.chosen.plan.at(table.name);
    Json shards = Json::array();
    for (const auto& shard : one.shards) {
      shards.push_back({{"rank", shard.rank},
                        {"row", shard.row},
                        {"rows", shard.rows},
                        {"column", shard.column},
                        {"columns", shard.columns},
                        {"bytes", weight_bytes(table, shard)}});
    }
    tables.push_back({{"name", table.name},
                      {"rows", table.num_embeddings},
                      {"dim", table.embedding_dim},
                      {"dtype", embedding::name_of(table.data_type)},
                      {"pooling", embedding::name_of(table.pooling)},
                      {"ids", subject.problem.tables[i].features[0].ids},
                      {"sharding", sharding::name_of(one.type)},
                      {"kernel", sharding::name_of(one.kernel)},
                      {"shards", std::move(shards)}});
  }
  Json ranks = Json::array();
  for (const RankCost& cost : subject.chosen.costs) {
    Json seconds = Json::object();
    for (const Part& part : kParts) seconds[part.name] = cost.seconds.*part.seconds;
    seconds["total"] = cost.seconds.total();
    ranks.push_back({{"bytes",
                      {{"weights", cost.bytes.weights},
                       {"optimizer", cost.bytes.optimizer},
                       {"batch", cost.bytes.batch},
                       {"total", cost.bytes.total()}}},
                     {"seconds", std::move(seconds)}});
  }
  Json others = Json::array();
  for (const PlanChoice& other : subject.others) {
    Json entry{{"sharding", other.sharding}, {"fits", subject.fits(other)}};
    if (other.obstacle.empty()) {
      entry["largest_rank_bytes"] = other.largest_rank();
      entry["slowest_rank_seconds"] = other.slowest_rank();
      entry["step_seconds"] = other.step_seconds;
      entry["gap"] = or_null(subject.gap(other));
    } else {
      entry["obstacle"] = other.obstacle;
    }
    others.push_back(std::move(entry));
  }
  return {{"ranks", subject.topology.world_size},
          {"hosts", subject.topology.num_hosts()},
          {"batch", subject.problem.batch},
          {"memory_bytes", subject.memory > 0 ? Json(subject.memory) : Json()},
          {"budget_bytes", subject.memory > 0 ? Json(subject.budget) : Json()},
          {"bandwidths",
           {{"memory", speeds.memory}, {"host", speeds.host}, {"network", speeds.network}}},
          {"speeds", subject.speeds_origin},
          {"sharding", subject.chosen.sharding},
          {"step_seconds", subject.chosen.step_seconds},
          {"bound_seconds", subject.bound > 0 ? Json(subject.bound) : Json()},
          {"gap", or_null(subject.gap(subject.chosen))},
          {"tables", std::move(tables)},
          {"per_rank", std::move(ranks)},
          {"choices", std::move(others)}};
}

}  // namespace tessera::cli
