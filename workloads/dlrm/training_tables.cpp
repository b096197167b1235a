#include "dlrm/training_tables.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include <nlohmann/json.hpp>

#include "dlrm/rank_machines.h"
#include "tessera/comm/leader.h"
#include "tessera/comm/topology.h"
#include "tessera/core/check.h"
#include "tessera/planner/plan_error.h"
#include "trainer/device.h"

namespace tessera::workloads::dlrm {
namespace {

using Json = nlohmann::ordered_json;
using sharding::ShardedEmbeddingBagCollection;

// The same number for the same seed, table, row and column, wherever the row lies.
float uniform(std::uint64_t seed, std::uint64_t table, std::uint64_t row, std::uint64_t column) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15U + table;
  for (const std::uint64_t word : {row, column}) {
    x = (x ^ word) + 0x9e3779b97f4a7c15U;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    x ^= x >> 31;
  }
  return static_cast<float>(x >> 40) * 0x1p-23F - 1.0F;
}

// Rows of the tables without what steps them, and which of them were stepped.
class PublishedTables final : public checkpoint::TableSource {
 public:
  explicit PublishedTables(std::shared_ptr<ShardedEmbeddingBagCollection> tables)
      : tables_(std::move(tables)) {
    for (const auto& optimizer : tables_->optimizers()) optimizer->track_rows();
  }

  std::vector<checkpoint::TableShard> shards() override {
    std::vector<checkpoint::TableShard> shards;
    for (const sharding::LocalShard& local : tables_->local_shards()) {
      checkpoint::TableShard shard;
      shard.name = "embedding_bags." + local.table + ".weight";
      shard.table_rows = local.table_rows;
      shard.table_columns = local.table_columns;
      shard.row = local.place.row;
      shard.column = local.place.column;
      shard.weight = local.weight;
      shard.is_replicated =
          tables_->plan().at(local.table).type == sharding::ShardingType::kDataParallel;
      for (const auto& optimizer : tables_->optimizers()) {
        if (optimizer->has_table(local.name)) {
          shard.touched_rows = optimizer->stepped_rows(local.name);
        }
      }
      shards.push_back(std::move(shard));
    }
    return shards;
  }

 private:
  std::shared_ptr<ShardedEmbeddingBagCollection> tables_;
};

TableMemory table_memory(const Settings& settings, int ranks_per_host) {
  if (settings.device != "cuda") return host_memory(ranks_per_host);
  const trainer::DeviceMemory memory =
      trainer::device_memory(trainer::device_of(settings), ranks_per_host);
  return {true, static_cast<double>(memory.bytes), memory.num_ranks};
}

}  // namespace

void fill_tables(const ShardedEmbeddingBagCollection& tables, std::uint64_t seed) {
  const auto& configs = tables.embedding_bag_configs();
  for (const sharding::LocalShard& shard : tables.local_shards()) {
    const auto config = std::find_if(configs.begin(), configs.end(),
                                     [&](const auto& one) { return one.name == shard.table; });
    const auto number = static_cast<std::uint64_t>(config - configs.begin());
    const auto bound = static_cast<float>(config->get_weight_init_max());
    const at::Tensor weight = shard.weight.detach();
    // On the host, so that tables start with the same numbers on every device.
    const at::Tensor drawn = weight.is_cpu() ? weight : at::empty(weight.sizes(), at::kFloat);
    auto* row = drawn.data_ptr<float>();
    for (std::int64_t r = 0; r < shard.place.rows; ++r, row += shard.place.columns) {
      for (std::int64_t c = 0; c < shard.place.columns; ++c) {
        row[c] = bound * uniform(seed, number, static_cast<std::uint64_t>(shard.place.row + r),
                                 static_cast<std::uint64_t>(shard.place.column + c));
      }
    }
    if (!weight.is_cpu()) weight.copy_(drawn);
  }
}

sharding::ShardedOptions table_options(const Settings& settings) {
  sharding::ShardedOptions tables;
  tables.optimizer.kind = table_optimizer_of(settings.table_optimizer);
  tables.optimizer.learning_rate = settings.table_learning_rate;
  tables.exact_row_norms = true;  // the same steps whether a table is cut by columns or not
  tables.device = trainer::device_of(settings);
  return tables;
}

LaidTables lay_tables(const std::string& verb, const Settings& settings, const ClickSchema& schema,
                      const std::vector<embedding::EmbeddingTableConfig>& tables,
                      const comm::Group& world) {
  const sharding::Topology topology{world.size(), comm::get_local_size(world.size())};
  LaidTables laid;
  planner::Problem problem;
  RankMachines machines = rank_machines(verb, settings.profile, topology,
                                        table_memory(settings, topology.local_size), world);
  if (world.rank() == 0) laid.known = std::move(machines.known);
  // Rank 0's files count; whatever is wrong with them is told on all ranks.
  const std::string answer = comm::invoke_on_rank_and_broadcast_result(world, 0, [&] {
    try {
      PlanRequest request;
      request.num_ranks = topology.world_size;
      request.ranks_per_host = topology.local_size;
      request.batch = settings.batch;
      request.table_optimizer = settings.table_optimizer;
      auto listed = planner_tables(schema, settings.embedding_dim, settings.bag_size);
      if (!settings.stats.empty()) apply_statistics(settings.stats, listed);
      problem = table_problem(std::move(listed), request);
      problem.ranks = std::move(machines.ranks);
    } catch (const planner::PlanError& error) {
      return nlohmann::json{{"error", error.what()}}.dump();
    }
    return is_planned(settings) ? planner_answer(problem) : std::string("{}");
  });
  laid.plan = is_planned(settings) || answer != "{}"
                  ? plan_from_answer(verb, answer, tables, topology)
                  : plan_of(verb, settings, tables, topology);
  for (const auto& [name, table] : laid.plan) {
    TESSERA_CHECK_VALUE(table.kernel == sharding::ComputeKernel::kFused, verb, ": table '", name,
                        "' has the kernel dense, whose rows no optimizer of this training steps. "
                        "Write fused into the plan.");
  }
  if (world.rank() == 0) laid.figures = figures_of(problem, laid.plan);
  return laid;
}

std::shared_ptr<checkpoint::TableSource> published_tables(
    std::shared_ptr<ShardedEmbeddingBagCollection> tables) {
  return std::make_shared<PublishedTables>(std::move(tables));
}

planner::DenseLoad dense_load(const Settings& settings, const std::vector<at::Tensor>& parameters,
                              std::size_t num_tables) {
  planner::DenseLoad load;
  load.layers = 0;
  double products = 0;
  for (const at::Tensor& parameter : parameters) {
    load.bytes += static_cast<double>(parameter.numel()) * 4;
    if (parameter.dim() != 2) continue;
    products += static_cast<double>(parameter.numel());
    ++load.layers;
  }
  const auto num_vectors = static_cast<double>(num_tables) + 1;
  if (settings.interaction == "dot") {
    products += num_vectors * num_vectors * static_cast<double>(settings.embedding_dim);
  }
  load.operations = 6 * static_cast<double>(settings.batch) * products;
  return load;
}

std::string plan_lines(const LaidTables& laid) {
  const PlanFigures& figures = laid.figures;
  char text[160];
  std::snprintf(text, sizeof(text),
                "plan     tables %.4g ms a step, no plan can be under %.4g ms (%.2f %%)\n",
                figures.seconds * 1e3, figures.bound * 1e3,
                figures.bound > 0 ? 100 * (figures.seconds / figures.bound - 1) : 0.0);
  return laid.known.note + "\n" + laid.known.caution + text;
}

std::string plan_record(const Settings& settings, const LaidTables& laid,
                        const std::optional<planner::StepTime>& predicted) {
  const PlanFigures& figures = laid.figures;
  Json ranks = Json::array();
  for (const planner::ShardCost& cost : figures.per_rank) {
    const planner::Seconds& seconds = cost.seconds;
    ranks.push_back({{"ids", seconds.ids},
                     {"lookup", seconds.lookup},
                     {"rows", seconds.rows},
                     {"gradients", seconds.gradients},
                     {"step", seconds.step},
                     {"bytes", cost.bytes.total()}});
  }
  Json record{{"kind", "plan"},
              {"sharding", settings.plan.empty() ? settings.sharding : settings.plan},
              {"seconds", figures.seconds},
              {"bound", figures.bound},
              {"speeds", laid.known.is_measured ? "measured" : "assumed"},
              {"ranks", std::move(ranks)}};
  if (predicted) {
    record["predicted"] = {{"links", predicted->links},         {"lookup", predicted->lookup},
                           {"dense", predicted->dense},         {"backward", predicted->backward},
                           {"gradients", predicted->gradients}, {"step", predicted->step},
                           {"other", predicted->other},         {"total", predicted->total()}};
    Json factors = Json::object();
    for (const planner::FactorName& name : planner::kCalibrationFactors) {
      factors[name.key] = laid.known.profile.calibration.*(name.factor);
    }
    record["calibration"] = std::move(factors);
  }
  return record.dump();
}

std::string prediction_line(const planner::StepTime& predicted, std::vector<double> step_seconds) {
  if (step_seconds.empty()) return "";
  std::vector<double>& times = step_seconds;
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  char text[160];
  std::snprintf(text, sizeof(text),
                "plan     predicted %.4g ms a step, measured %.4g ms (%+.0f %%)\n",
                predicted.total() * 1e3, *middle * 1e3, 100 * (*middle / predicted.total() - 1));
  return text;
}

std::string largest_tables(const std::vector<embedding::EmbeddingTableConfig>& tables,
                           const sharding::ModulePlan& plan) {
  constexpr std::size_t kShown = 10;
  std::vector<const embedding::EmbeddingTableConfig*> order;
  for (const auto& table : tables) order.push_back(&table);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return a->num_embeddings * a->embedding_dim > b->num_embeddings * b->embedding_dim;
  });
  sharding::ModulePlan shown;
  for (std::size_t i = 0; i < std::min(kShown, order.size()); ++i) {
    shown[order[i]->name] = plan.at(order[i]->name);
  }
  std::string text = sharding::ShardingPlan{{{kModule, shown}}}.str(80);
  if (order.size() > kShown) {
    text += "  and " + std::to_string(order.size() - kShown) +
            " tables that are not larger; tessera plan tables shows all\n";
  }
  return text;
}

std::string table_record(const embedding::EmbeddingTableConfig& table,
                         const sharding::ParameterSharding& sharding, double lookups) {
  Json shards = Json::array();
  const bool is_copied = sharding.type == sharding::ShardingType::kDataParallel;
  for (const sharding::Shard& shard : sharding.shards) {
    const double share =
        is_copied ? 1.0 / static_cast<double>(sharding.shards.size())
                  : static_cast<double>(shard.rows) / static_cast<double>(table.num_embeddings);
    shards.push_back({{"rank", shard.rank},
                      {"row", shard.row},
                      {"rows", shard.rows},
                      {"column", shard.column},
                      {"columns", shard.columns},
                      {"bytes", 4 * shard.rows * shard.columns},
                      {"traffic", 4 * lookups * share * static_cast<double>(shard.columns)}});
  }
  const Json record{{"kind", "table"},
                    {"name", table.name},
                    {"rows", table.num_embeddings},
                    {"columns", table.embedding_dim},
                    {"bytes", 4 * table.num_embeddings * table.embedding_dim},
                    {"sharding", sharding::name_of(sharding.type)},
                    {"shards", shards}};
  return record.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace tessera::workloads::dlrm
