#include <algorithm>
#include <set>
#include <string>

#include "tessera/core/check.h"
#include "tessera/sharding/plan.h"

namespace tessera::sharding {
namespace {

using embedding::EmbeddingTableConfig;

struct Subject {
  std::string title;
  const EmbeddingTableConfig& table;
  const ParameterSharding& sharding;
  const Topology& topology;
};

std::string text_of(const Shard& shard) {
  return "rows [" + std::to_string(shard.row) + ", " + std::to_string(shard.row + shard.rows) +
         "), columns [" + std::to_string(shard.column) + ", " +
         std::to_string(shard.column + shard.columns) + ")";
}

void check_shard(const Subject& subject, const Shard& shard) {
  const auto& [title, table, sharding, topology] = subject;
  TESSERA_CHECK_VALUE(shard.rank >= 0 && shard.rank < topology.world_size, title,
                      ": there is no rank ", shard.rank, " among ", topology.world_size, ".");
  const bool is_inside =
      shard.row >= 0 && shard.rows >= 0 && shard.column >= 0 && shard.columns > 0 &&
      shard.row <= table.num_embeddings && shard.rows <= table.num_embeddings - shard.row &&
      shard.column < table.embedding_dim && shard.columns <= table.embedding_dim - shard.column;
  TESSERA_CHECK_VALUE(is_inside, title, ": the shard of ", text_of(shard),
                      " is not within the table of ", table.num_embeddings, " x ",
                      table.embedding_dim, ".");
}

// Shards in order of columns, then rows, without a hole and without an overlap.
void check_cover(const Subject& subject) {
  const auto& [title, table, sharding, topology] = subject;
  std::int64_t column = 0;
  std::int64_t columns = 0;
  std::int64_t row = table.num_embeddings;  // the next part begins
  for (const Shard& shard : sharding.shards) {
    if (row == table.num_embeddings && shard.column == column + columns) {
      column += columns;
      columns = shard.columns;
      row = 0;
    }
    TESSERA_CHECK_VALUE(
        shard.row == row && shard.column == column && shard.columns == columns, title,
        ": the shard of ", text_of(shard),
        " does not begin where the one before it ends. Shards cover the table once, in order of "
        "columns, then rows.");
    row += shard.rows;
  }
  TESSERA_CHECK_VALUE(row == table.num_embeddings && column + columns == table.embedding_dim, title,
                      ": the shards end before the table of ", table.num_embeddings, " x ",
                      table.embedding_dim, " does.");
}

bool has_all_rows(const Subject& subject, const Shard& shard) {
  return shard.rows == subject.table.num_embeddings;
}

bool has_all_columns(const Subject& subject, const Shard& shard) {
  return shard.columns == subject.table.embedding_dim;
}

// Whether `count` shards from `begin` on are on ranks first, first + 1, …
bool are_on_ranks(const std::vector<Shard>& shards, std::size_t begin, int count, int first) {
  if (shards.size() < begin + static_cast<std::size_t>(count)) return false;
  for (int i = 0; i < count; ++i) {
    if (shards[begin + static_cast<std::size_t>(i)].rank != first + i) return false;
  }
  return true;
}

bool is_on_one_host(const Subject& subject) {
  const int local = subject.topology.local_size;
  const std::vector<Shard>& shards = subject.sharding.shards;
  return std::all_of(shards.begin(), shards.end(), [&](const Shard& shard) {
    return shard.rank / local == shards[0].rank / local;
  });
}

// Whether every part of the columns lies over all ranks of one host.
bool is_grid(const Subject& subject) {
  const int local = subject.topology.local_size;
  const std::vector<Shard>& shards = subject.sharding.shards;
  const auto step = static_cast<std::size_t>(local);
  if (shards.size() % step != 0) return false;
  for (std::size_t begin = 0; begin < shards.size(); begin += step) {
    if (shards[begin].rank % local != 0 ||
        !are_on_ranks(shards, begin, local, shards[begin].rank) ||
        shards[begin + step - 1].column != shards[begin].column) {
      return false;
    }
  }
  return true;
}

void check_shape(const Subject& subject) {
  const auto& [title, table, sharding, topology] = subject;
  const std::vector<Shard>& shards = sharding.shards;
  const auto all = [&](auto property) {
    return std::all_of(shards.begin(), shards.end(),
                       [&](const Shard& shard) { return property(subject, shard); });
  };
  const auto has = [&](int count) { return shards.size() == static_cast<std::size_t>(count); };
  bool fits = false;
  const char* rule = "";
  switch (sharding.type) {
    case ShardingType::kDataParallel:
      fits = has(topology.world_size) && are_on_ranks(shards, 0, topology.world_size, 0) &&
             all(has_all_rows) && all(has_all_columns);
      rule = "the whole table once for every rank, in order";
      break;
    case ShardingType::kTableWise:
      fits = has(1);
      rule = "one shard";
      break;
    case ShardingType::kColumnWise:
      fits = all(has_all_rows);
      rule = "all rows in every shard";
      break;
    case ShardingType::kRowWise:
      fits = has(topology.world_size) && are_on_ranks(shards, 0, topology.world_size, 0) &&
             all(has_all_columns);
      rule = "all columns in every shard, and one shard for every rank, in order";
      break;
    case ShardingType::kTableRowWise:
      fits = has(topology.local_size) && is_grid(subject) && all(has_all_columns);
      rule = "all columns in every shard, and one shard for every rank of one host, in order";
      break;
    case ShardingType::kTableColumnWise:
      fits = all(has_all_rows) && is_on_one_host(subject);
      rule = "all rows in every shard, and ranks of one host";
      break;
    case ShardingType::kGrid:
      fits = is_grid(subject);
      rule = "for every part of the columns one shard for every rank of one host, in order";
      break;
  }
  TESSERA_CHECK_VALUE(fits, title, ": the shards do not lie as ", name_of(sharding.type),
                      " says: ", rule, ".");
}

void check_sharding(const Subject& subject) {
  const auto& [title, table, sharding, topology] = subject;
  TESSERA_CHECK_VALUE(!sharding.shards.empty(), title, ": there are no shards.");
  std::vector<int> ranks;
  for (const Shard& shard : sharding.shards) {
    check_shard(subject, shard);
    ranks.push_back(shard.rank);
  }
  TESSERA_CHECK_VALUE(sharding.ranks == ranks, title, ": ranks are [", sharding.ranks,
                      "], those of the shards are [", ranks, "].");
  if (sharding.type != ShardingType::kDataParallel) check_cover(subject);
  check_shape(subject);
}

}  // namespace

void check_module_plan(std::string_view operation, const std::vector<EmbeddingTableConfig>& tables,
                       const ModulePlan& plan, const Topology& topology) {
  TESSERA_CHECK_VALUE(topology.world_size > 0 && topology.local_size > 0 &&
                          topology.world_size % topology.local_size == 0,
                      operation, ": ", topology.world_size, " ranks are not hosts of ",
                      topology.local_size, ".");
  embedding::check_tables(operation, tables);
  std::set<std::string> names;
  for (const EmbeddingTableConfig& table : tables) {
    names.insert(table.name);
    const auto found = plan.find(table.name);
    TESSERA_CHECK_VALUE(found != plan.end(), operation, ": the plan has no table '", table.name,
                        "'.");
    check_sharding({std::string(operation).append(": table '").append(table.name).append("'"),
                    table, found->second, topology});
  }
  for (const auto& [name, sharding] : plan) {
    TESSERA_CHECK_VALUE(names.contains(name), operation, ": the plan has a table '", name,
                        "' that is not there.");
  }
}

}  // namespace tessera::sharding
