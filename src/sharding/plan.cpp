#include "tessera/sharding/plan.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "tessera/core/check.h"

namespace tessera::sharding {
namespace {

using embedding::EmbeddingTableConfig;

constexpr std::array<std::pair<ShardingType, std::string_view>, 7> kTypes = {{
    {ShardingType::kDataParallel, "data_parallel"},
    {ShardingType::kTableWise, "table_wise"},
    {ShardingType::kColumnWise, "column_wise"},
    {ShardingType::kRowWise, "row_wise"},
    {ShardingType::kTableRowWise, "table_row_wise"},
    {ShardingType::kTableColumnWise, "table_column_wise"},
    {ShardingType::kGrid, "grid_shard"},
}};
constexpr std::array<std::pair<ComputeKernel, std::string_view>, 2> kKernels = {{
    {ComputeKernel::kDense, "dense"},
    {ComputeKernel::kFused, "fused"},
}};

template <class Names, class Value>
std::string_view find_name(const Names& names, Value value) noexcept {
  for (const auto& [known, name] : names) {
    if (known == value) return name;
  }
  return "unknown";
}

template <class Names>
auto find_value(const Names& names, std::string_view name, const char* operation) {
  std::string all;
  for (const auto& [value, known] : names) {
    if (known == name) return value;
    all.append(all.empty() ? "" : ", ").append(known);
  }
  TESSERA_CHECK_VALUE(false, operation, ": '", name, "' is not one of ", all, ".");
}

constexpr const char* kPlace = "sharding.place";

// The table and the ranks that a wish meets.
struct Site {
  const EmbeddingTableConfig& table;
  const Topology& topology;
  ShardingType type;
};

std::string title(const Site& site) {
  return std::string(kPlace)
      .append(": table '")
      .append(site.table.name)
      .append("', ")
      .append(name_of(site.type));
}

std::vector<std::int64_t> even(std::int64_t total, std::size_t parts) {
  std::vector<std::int64_t> sizes(parts, total / static_cast<std::int64_t>(parts));
  for (std::size_t i = 0; i < static_cast<std::size_t>(total) % parts; ++i) ++sizes[i];
  return sizes;
}

// ceil(total / parts) each, the last ones fewer or none.
std::vector<std::int64_t> blocks(std::int64_t total, int parts) {
  const std::int64_t block = (total + parts - 1) / parts;
  std::vector<std::int64_t> sizes;
  for (int part = 0; part < parts; ++part) {
    sizes.push_back(std::clamp<std::int64_t>(total - part * block, 0, block));
  }
  return sizes;
}

std::vector<std::int64_t> column_sizes(const Site& site, const std::vector<std::int64_t>& wished,
                                       std::size_t parts) {
  const std::int64_t dim = site.table.embedding_dim;
  TESSERA_CHECK_VALUE(parts > 0, title(site), ": there are no parts. Name at least one place.");
  if (wished.empty()) {
    TESSERA_CHECK_VALUE(static_cast<std::int64_t>(parts) <= dim, title(site), ": ", dim,
                        " columns cannot be cut into ", parts, " parts.");
    return even(dim, parts);
  }
  TESSERA_CHECK_VALUE(wished.size() == parts, title(site), ": there are ", wished.size(),
                      " widths for ", parts, " parts.");
  for (const std::int64_t width : wished) {
    TESSERA_CHECK_VALUE(width > 0, title(site), ": a part is ", width,
                        " columns wide. It must be at least 1.");
  }
  const std::int64_t sum = std::accumulate(wished.begin(), wished.end(), std::int64_t{0});
  TESSERA_CHECK_VALUE(sum == dim, title(site), ": the parts have ", sum,
                      " columns together, the table has ", dim, ".");
  return wished;
}

std::vector<std::int64_t> row_sizes(const Site& site, const std::vector<std::int64_t>& wished) {
  const int world = site.topology.world_size;
  const std::int64_t rows = site.table.num_embeddings;
  if (wished.empty()) return blocks(rows, world);
  TESSERA_CHECK_VALUE(wished.size() == static_cast<std::size_t>(world), title(site), ": there are ",
                      wished.size(), " numbers of rows for ", world, " ranks.");
  for (const std::int64_t count : wished) {
    TESSERA_CHECK_VALUE(count >= 0, title(site), ": a rank has ", count,
                        " rows. It cannot be fewer than 0.");
  }
  const std::int64_t sum = std::accumulate(wished.begin(), wished.end(), std::int64_t{0});
  TESSERA_CHECK_VALUE(sum == rows, title(site), ": the ranks have ", sum,
                      " rows together, the table has ", rows, ".");
  return wished;
}

void check_rank(const Site& site, int rank) {
  TESSERA_CHECK_VALUE(rank >= 0 && rank < site.topology.world_size, title(site),
                      ": there is no rank ", rank, " among ", site.topology.world_size, ".");
}

void check_host(const Site& site, int host) {
  TESSERA_CHECK_VALUE(host >= 0 && host < site.topology.num_hosts(), title(site),
                      ": there is no host ", host, " among ", site.topology.num_hosts(), ".");
}

void check_topology(std::string_view operation, const Topology& topology) {
  TESSERA_CHECK_VALUE(topology.world_size > 0, operation, ": there are ", topology.world_size,
                      " ranks. There must be at least 1.");
  TESSERA_CHECK_VALUE(topology.local_size > 0 && topology.world_size % topology.local_size == 0,
                      operation, ": ", topology.world_size, " ranks are not hosts of ",
                      topology.local_size, ".");
}

// Adds rows cut as `sizes` says, from rank `first` on, to the columns of `part`.
void add_rows(std::vector<Shard>& shards, Shard part, const std::vector<std::int64_t>& sizes,
              int first) {
  part.rank = first;
  for (const std::int64_t rows : sizes) {
    part.rows = rows;
    shards.push_back(part);
    part.row += rows;
    ++part.rank;
  }
}

Shard whole(const EmbeddingTableConfig& table, int rank) {
  return {0, 0, table.num_embeddings, table.embedding_dim, rank};
}

std::vector<Shard> cut_columns(const Site& site, const std::vector<int>& ranks,
                               const std::vector<std::int64_t>& widths) {
  for (const int rank : ranks) check_rank(site, rank);
  const std::vector<std::int64_t> sizes = column_sizes(site, widths, ranks.size());
  std::vector<Shard> shards;
  std::int64_t column = 0;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    shards.push_back({0, column, site.table.num_embeddings, sizes[i], ranks[i]});
    column += sizes[i];
  }
  return shards;
}

void check_one_host(const Site& site, const std::vector<int>& ranks) {
  const int local = site.topology.local_size;
  for (const int rank : ranks) {
    TESSERA_CHECK_VALUE(rank / local == ranks[0] / local, title(site), ": ranks ", ranks[0],
                        " and ", rank, " are on different hosts of ", local, " ranks.");
  }
}

std::vector<Shard> cut_grid(const Site& site, const std::vector<int>& hosts,
                            const std::vector<std::int64_t>& widths) {
  for (const int host : hosts) check_host(site, host);
  const std::vector<std::int64_t> sizes = column_sizes(site, widths, hosts.size());
  const int local = site.topology.local_size;
  std::vector<Shard> shards;
  Shard part;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    part.columns = sizes[i];
    add_rows(shards, part, blocks(site.table.num_embeddings, local), hosts[i] * local);
    part.column += sizes[i];
  }
  return shards;
}

}  // namespace

std::string_view name_of(ShardingType type) noexcept { return find_name(kTypes, type); }

ShardingType sharding_type_of(std::string_view name) {
  return find_value(kTypes, name, "sharding.sharding_type_of");
}

std::string_view name_of(ComputeKernel kernel) noexcept { return find_name(kKernels, kernel); }

ComputeKernel compute_kernel_of(std::string_view name) {
  return find_value(kKernels, name, "sharding.compute_kernel_of");
}

const ModulePlan* ShardingPlan::get_plan_for_module(const std::string& path) const {
  const auto found = modules.find(path);
  return found == modules.end() ? nullptr : &found->second;
}

ParameterSharding Placement::place(const EmbeddingTableConfig& table,
                                   const Topology& topology) const {
  const Site site{table, topology, type_};
  check_topology(title(site), topology);
  TESSERA_CHECK_VALUE(table.num_embeddings > 0 && table.embedding_dim > 0, title(site),
                      ": the table is ", table.num_embeddings, " x ", table.embedding_dim,
                      ". It must have rows and columns.");
  ParameterSharding sharding{type_, kernel_, {}, {}};
  switch (type_) {
    case ShardingType::kDataParallel:
      for (int rank = 0; rank < topology.world_size; ++rank) {
        sharding.shards.push_back(whole(table, rank));
      }
      break;
    case ShardingType::kTableWise:
      check_rank(site, ranks_.at(0));
      sharding.shards = {whole(table, ranks_[0])};
      break;
    case ShardingType::kRowWise:
      add_rows(sharding.shards, whole(table, 0), row_sizes(site, sizes_), 0);
      break;
    case ShardingType::kColumnWise:
      sharding.shards = cut_columns(site, ranks_, sizes_);
      break;
    case ShardingType::kTableColumnWise:
      sharding.shards = cut_columns(site, ranks_, sizes_);
      check_one_host(site, ranks_);
      break;
    case ShardingType::kTableRowWise:
      check_host(site, ranks_.at(0));
      add_rows(sharding.shards, whole(table, 0), blocks(table.num_embeddings, topology.local_size),
               ranks_[0] * topology.local_size);
      break;
    case ShardingType::kGrid:
      sharding.shards = cut_grid(site, ranks_, sizes_);
      break;
  }
  for (const Shard& shard : sharding.shards) sharding.ranks.push_back(shard.rank);
  return sharding;
}

Placement Placement::with_kernel(ComputeKernel kernel) const {
  Placement other = *this;
  other.kernel_ = kernel;
  return other;
}

Placement data_parallel() {
  Placement wish;
  wish.type_ = ShardingType::kDataParallel;
  wish.kernel_ = ComputeKernel::kDense;
  return wish;
}

Placement table_wise(int rank) {
  Placement wish;
  wish.ranks_ = {rank};
  return wish;
}

Placement row_wise(std::vector<std::int64_t> rows_per_rank) {
  Placement wish;
  wish.type_ = ShardingType::kRowWise;
  wish.sizes_ = std::move(rows_per_rank);
  return wish;
}

Placement column_wise(std::vector<int> ranks, std::vector<std::int64_t> columns) {
  Placement wish;
  wish.type_ = ShardingType::kColumnWise;
  wish.ranks_ = std::move(ranks);
  wish.sizes_ = std::move(columns);
  return wish;
}

Placement table_row_wise(int host) {
  Placement wish;
  wish.type_ = ShardingType::kTableRowWise;
  wish.ranks_ = {host};
  return wish;
}

Placement table_column_wise(std::vector<int> ranks, std::vector<std::int64_t> columns) {
  Placement wish = column_wise(std::move(ranks), std::move(columns));
  wish.type_ = ShardingType::kTableColumnWise;
  return wish;
}

Placement grid_shard(std::vector<int> hosts, std::vector<std::int64_t> columns) {
  Placement wish = column_wise(std::move(hosts), std::move(columns));
  wish.type_ = ShardingType::kGrid;
  return wish;
}

ModulePlan make_module_plan(const std::vector<EmbeddingTableConfig>& tables,
                            const std::map<std::string, Placement>& wishes,
                            const Topology& topology) {
  constexpr const char* kOperation = "sharding.make_module_plan";
  embedding::check_tables(kOperation, tables);
  ModulePlan plan;
  for (const EmbeddingTableConfig& table : tables) {
    const auto wish = wishes.find(table.name);
    TESSERA_CHECK_VALUE(wish != wishes.end(), kOperation, ": nothing is said about table '",
                        table.name, "'.");
    plan.emplace(table.name, wish->second.place(table, topology));
  }
  for (const auto& [name, wish] : wishes) {
    TESSERA_CHECK_VALUE(plan.contains(name), kOperation, ": there is no table '", name, "'.");
  }
  return plan;
}

}  // namespace tessera::sharding
