#include "sharding/table_layout.h"

#include <algorithm>
#include <map>
#include <sstream>

#include "sharding/agreement.h"
#include "tessera/core/check.h"

namespace tessera::sharding {
namespace {

using embedding::EmbeddingTableConfig;

int lowest_rank(const ParameterSharding& sharding) {
  int lowest = sharding.shards.empty() ? 0 : sharding.shards[0].rank;
  for (const Shard& shard : sharding.shards) lowest = std::min(lowest, shard.rank);
  return lowest;
}

std::vector<std::size_t> output_order(const TableLayout& layout) {
  std::vector<ShardingType> types;
  for (const auto* sharding : layout.shardings) {
    if (std::find(types.begin(), types.end(), sharding->type) == types.end()) {
      types.push_back(sharding->type);
    }
  }
  std::vector<std::size_t> order;
  for (const ShardingType type : types) {
    std::vector<std::size_t> own;
    for (std::size_t t = 0; t < layout.tables.size(); ++t) {
      if (layout.sharding(t).type == type) own.push_back(t);
    }
    if (type != ShardingType::kDataParallel) {
      std::stable_sort(own.begin(), own.end(), [&](std::size_t a, std::size_t b) {
        return lowest_rank(layout.sharding(a)) < lowest_rank(layout.sharding(b));
      });
    }
    order.insert(order.end(), own.begin(), own.end());
  }
  return order;
}

std::string description(const TableLayout& layout, std::size_t t) {
  const EmbeddingTableConfig& table = layout.tables[t];
  const ParameterSharding& sharding = layout.sharding(t);
  std::ostringstream text;
  text << "'" << table.name << "': " << table.num_embeddings << " x " << table.embedding_dim << " "
       << embedding::name_of(table.data_type) << ", " << embedding::name_of(table.pooling)
       << ", features";
  for (const auto& feature : table.features()) text << " '" << feature << "'";
  text << ", " << name_of(sharding.type) << ", " << name_of(sharding.kernel);
  for (const Shard& shard : sharding.shards) {
    text << ", " << shard.rows << " x " << shard.columns << " at " << shard.row << ", "
         << shard.column << " on rank " << shard.rank;
  }
  return text.str();
}

}  // namespace

TableLayout::TableLayout(std::string own_operation, std::vector<EmbeddingTableConfig> own_tables,
                         ModulePlan own_plan, const Topology& own_topology, bool is_pooled,
                         bool own_sums_in_hosts)
    : operation(std::move(own_operation)),
      topology(own_topology),
      sums_in_hosts(own_sums_in_hosts),
      tables(std::move(own_tables)),
      plan(std::move(own_plan)),
      routes(static_cast<std::size_t>(topology.world_size)) {
  embedding::check_tables(operation, tables);
  TESSERA_CHECK_VALUE(!tables.empty(), operation, ": there are no tables.");
  for (const auto& table : tables) {
    TESSERA_CHECK_VALUE(embedding::is_trainable(table.data_type), operation, ": table '",
                        table.name, "' has rows of ", embedding::name_of(table.data_type),
                        ", which do not train. Use FP32, FP16 or BF16.");
    TESSERA_CHECK_VALUE(!is_pooled || table.pooling != embedding::PoolingType::kNone, operation,
                        ": table '", table.name,
                        "' has pooling NONE. Use a ShardedEmbeddingCollection.");
  }
  check_module_plan(operation, tables, plan, topology);
  for (const auto& table : tables) shardings.push_back(&plan.at(table.name));

  std::map<std::string, std::size_t> number_of;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    for (const auto& feature : tables[t].features()) {
      const auto [found, is_new] = number_of.emplace(feature, features.size());
      if (is_new) {
        features.push_back(feature);
        smallest_table.push_back(t);
      } else if (tables[t].num_embeddings < tables[smallest_table[found->second]].num_embeddings) {
        smallest_table[found->second] = t;
      }
    }
  }

  const auto names = embedding::embedding_names_by_table(tables);
  std::vector<std::size_t> first_output(tables.size());
  for (const std::size_t t : output_order(*this)) {
    first_output[t] = outputs.size();
    const auto own = tables[t].features();
    for (std::size_t f = 0; f < own.size(); ++f) {
      outputs.push_back({names[t][f], t, number_of.at(own[f]), tables[t].embedding_dim});
    }
  }
  const auto add_routes = [&](std::size_t t) {
    const auto own = tables[t].features();
    for (std::size_t s = 0; s < sharding(t).shards.size(); ++s) {
      if (is_local(sharding(t)) && s > 0) break;
      const Shard& shard = sharding(t).shards[s];
      if (shard.rows == 0 && !is_hosted(t)) continue;
      auto& list = is_local(sharding(t)) ? local : routes[static_cast<std::size_t>(shard.rank)];
      for (std::size_t f = 0; f < own.size(); ++f) {
        list.push_back({t, number_of.at(own[f]), first_output[t] + f, s});
      }
    }
  };
  for (std::size_t t = 0; t < tables.size(); ++t) {
    if (!is_hosted(t)) add_routes(t);
  }
  for (std::size_t t = 0; t < tables.size(); ++t) {
    if (is_hosted(t)) add_routes(t);
    has_hosted |= is_hosted(t);
    has_routes |= !is_local(sharding(t));
  }
}

bool TableLayout::is_hosted(std::size_t table) const {
  const ShardingType type = sharding(table).type;
  return sums_in_hosts && topology.num_hosts() > 1 && topology.local_size > 1 &&
         (type == ShardingType::kTableRowWise || type == ShardingType::kGrid);
}

bool TableLayout::is_row_cut(std::size_t table) const {
  return !is_local(sharding(table)) &&
         std::any_of(
             sharding(table).shards.begin(), sharding(table).shards.end(),
             [&](const Shard& shard) { return shard.rows != tables[table].num_embeddings; });
}

void check_same_layout(const TableLayout& layout, const comm::Group& group,
                       const std::string& options) {
  std::vector<std::string> lines;
  for (std::size_t t = 0; t < layout.tables.size(); ++t) lines.push_back(description(layout, t));
  if (!options.empty()) lines.push_back(options);
  check_same_lines(layout.operation, lines, group);
}

}  // namespace tessera::sharding
