// Whole tables into shards, and back.

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "comm/engines.h"
#include "sharding/local_tables.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"

namespace tessera::sharding {

void load_shards(const TableLayout& layout, const std::vector<LocalShard>& shards,
                 const std::map<std::string, at::Tensor>& tables) {
  for (const auto& table : layout.tables) {
    const auto found = tables.find(table.name);
    TESSERA_CHECK_VALUE(found != tables.end(), layout.operation, ": table '", table.name,
                        "' is missing among those to load.");
    TESSERA_CHECK_VALUE(found->second.dim() == 2 && found->second.size(0) == table.num_embeddings &&
                            found->second.size(1) == table.embedding_dim,
                        layout.operation, ": table '", table.name, "' to load has shape ",
                        found->second.sizes(), ", it should have [", table.num_embeddings, ", ",
                        table.embedding_dim, "].");
  }
  const at::NoGradGuard no_grad;
  for (const LocalShard& shard : shards) {
    at::Tensor weight = shard.weight;
    weight.copy_(tables.at(shard.table)
                     .narrow(0, shard.place.row, shard.place.rows)
                     .narrow(1, shard.place.column, shard.place.columns));
  }
}

std::map<std::string, at::Tensor> gather_shards(const TableLayout& layout,
                                                const std::vector<LocalShard>& shards,
                                                const comm::Group& group) {
  const at::NoGradGuard no_grad;
  const at::Device device = comm::message_device(*group.process_group());
  std::map<std::string, at::Tensor> tables;
  auto own = shards.begin();
  for (std::size_t t = 0; t < layout.tables.size(); ++t) {
    const auto& table = layout.tables[t];
    const bool is_local = layout.sharding(t).type == ShardingType::kDataParallel;
    at::Tensor whole;
    for (const Shard& shard : layout.sharding(t).shards) {
      const bool is_own = shard.rank == group.rank();
      if (!whole.defined()) {
        whole = at::empty({table.num_embeddings, table.embedding_dim},
                          embedding::scalar_type(table.data_type));
      }
      if (is_own || !is_local) {
        at::Tensor part =
            is_own ? (own++)->weight.detach().to(device).clone()
                   : at::empty({shard.rows, shard.columns}, whole.options().device(device));
        if (!is_local && group.size() > 1 && shard.rows > 0) {
          comm::broadcast_(part, shard.rank, group);
        }
        whole.narrow(0, shard.row, shard.rows).narrow(1, shard.column, shard.columns).copy_(part);
      }
    }
    tables[table.name] = whole;
  }
  return tables;
}

}  // namespace tessera::sharding
