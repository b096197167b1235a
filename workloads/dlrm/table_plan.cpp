// Which table goes where if nobody says.

#include <algorithm>
#include <map>
#include <numeric>

#include "dlrm/training.h"
#include "tessera/core/check.h"

namespace tessera::workloads::dlrm {
namespace {

using embedding::EmbeddingTableConfig;
using sharding::Placement;

double bytes_of(const EmbeddingTableConfig& table) {
  return static_cast<double>(table.num_embeddings) * static_cast<double>(table.embedding_dim) *
         embedding::bits_of(table.data_type) / 8;
}

// Largest first, each to the rank with fewest bytes; ties to the lowest rank.
std::map<std::string, Placement> greedy(const std::vector<EmbeddingTableConfig>& tables,
                                        bool cuts_rows, int num_ranks) {
  std::vector<const EmbeddingTableConfig*> order;
  double total = 0;
  for (const auto& table : tables) {
    order.push_back(&table);
    total += bytes_of(table);
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const auto* a, const auto* b) { return bytes_of(*a) > bytes_of(*b); });
  std::vector<double> loads(static_cast<std::size_t>(num_ranks), 0.0);
  std::map<std::string, Placement> wishes;
  for (const EmbeddingTableConfig* table : order) {
    if (cuts_rows && num_ranks > 1 && bytes_of(*table) > total / num_ranks) {
      wishes.emplace(table->name, sharding::row_wise());
      continue;  // the same on every rank
    }
    const auto least = std::min_element(loads.begin(), loads.end());
    wishes.emplace(table->name, sharding::table_wise(static_cast<int>(least - loads.begin())));
    *least += bytes_of(*table);
  }
  return wishes;
}

}  // namespace

std::vector<EmbeddingTableConfig> tables_of(const ClickSchema& schema, std::int64_t embedding_dim) {
  std::vector<EmbeddingTableConfig> tables;
  for (const Feature& feature : schema.features) {
    EmbeddingTableConfig table;
    table.name = feature.name;
    table.num_embeddings = feature.num_rows;
    table.embedding_dim = feature.dim_or(embedding_dim);
    table.feature_names = {feature.name};
    if (feature.means) table.pooling = embedding::PoolingType::kMean;
    tables.push_back(std::move(table));
  }
  return tables;
}

sharding::ModulePlan default_plan(const std::vector<EmbeddingTableConfig>& tables,
                                  const std::string& sharding, const sharding::Topology& topology) {
  std::map<std::string, Placement> wishes;
  if (sharding == "balanced" || sharding == "table_wise") {
    wishes = greedy(tables, sharding == "balanced", topology.world_size);
  } else {
    std::vector<int> ranks(static_cast<std::size_t>(topology.world_size));
    std::iota(ranks.begin(), ranks.end(), 0);
    for (const auto& table : tables) {
      if (sharding == "row_wise") {
        wishes.emplace(table.name, sharding::row_wise());
      } else if (sharding == "column_wise") {
        wishes.emplace(table.name, sharding::column_wise(ranks));
      } else if (sharding == "data_parallel") {
        wishes.emplace(table.name,
                       sharding::data_parallel().with_kernel(sharding::ComputeKernel::kFused));
      } else {
        TESSERA_CHECK_VALUE(false, "dlrm.plan: there is no sharding '", sharding,
                            "'. There are balanced, table_wise, row_wise, column_wise and "
                            "data_parallel.");
      }
    }
  }
  return sharding::make_module_plan(tables, wishes, topology);
}

std::vector<double> bytes_per_rank(const sharding::ModulePlan& plan, int num_ranks) {
  std::vector<double> bytes(static_cast<std::size_t>(num_ranks), 0.0);
  for (const auto& [name, table] : plan) {
    for (const sharding::Shard& shard : table.shards) {
      bytes[static_cast<std::size_t>(shard.rank)] +=
          4.0 * static_cast<double>(shard.rows) * static_cast<double>(shard.columns);
    }
  }
  return bytes;
}

}  // namespace tessera::workloads::dlrm
