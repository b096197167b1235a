#include "sharding/row_norms.h"

#include <algorithm>
#include <map>

#include <ATen/ATen.h>

#include "sharding/subgroups.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"

namespace tessera::sharding {
namespace {

bool is_column_cut(const TableLayout& layout, std::size_t table) {
  const auto& shards = layout.sharding(table).shards;
  return layout.sharding(table).type != ShardingType::kDataParallel &&
         layout.sharding(table).kernel != ComputeKernel::kDense &&
         std::any_of(shards.begin(), shards.end(), [&](const Shard& shard) {
           return shard.columns < layout.tables[table].embedding_dim;
         });
}

bool has_same_rows(const Shard& a, const Shard& b) { return a.row == b.row && a.rows == b.rows; }

void check_parts(const TableLayout& layout, std::size_t table) {
  const auto& shards = layout.sharding(table).shards;
  for (const Shard& a : shards) {
    for (const Shard& b : shards) {
      const bool overlap = a.row < b.row + b.rows && b.row < a.row + a.rows;
      TESSERA_CHECK_VALUE(!overlap || has_same_rows(a, b), layout.operation, ": table '",
                          layout.tables[table].name, "' has a part of rows ", a.row, " to ",
                          a.row + a.rows - 1, " and a part of rows ", b.row, " to ",
                          b.row + b.rows - 1,
                          ". For exact row norms all parts of the columns need the same rows.");
    }
  }
}

}  // namespace

bool RowNorms::has_cut_columns(const TableLayout& layout) {
  for (std::size_t t = 0; t < layout.tables.size(); ++t) {
    if (is_column_cut(layout, t)) return true;
  }
  return false;
}

RowNorms::RowNorms(const TableLayout& layout, const comm::Group& group,
                   std::vector<std::pair<std::size_t, std::size_t>> shards) {
  std::vector<int> ranks;
  for (std::size_t t = 0; t < layout.tables.size(); ++t) {
    if (!is_column_cut(layout, t)) continue;
    check_parts(layout, t);
    for (const Shard& shard : layout.sharding(t).shards) {
      if (shard.rows > 0) ranks.push_back(shard.rank);
    }
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  group_ = shared_subgroup(group, ranks);
  if (!group_) return;
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> number_of;
  for (std::size_t i = 0; i < shards.size(); ++i) number_of[shards[i]] = i;
  // Both sides walk the pairs of parts in the same order: by the part that gets, then the one that
  // gives.
  for (const int other : ranks) {
    auto& send = send_.emplace_back();
    auto& receive = receive_.emplace_back();
    for (std::size_t t = 0; t < layout.tables.size(); ++t) {
      if (!is_column_cut(layout, t)) continue;
      const auto& parts = layout.sharding(t).shards;
      for (std::size_t to = 0; to < parts.size(); ++to) {
        for (std::size_t from = 0; from < parts.size(); ++from) {
          if (parts[to].rows == 0 || !has_same_rows(parts[to], parts[from])) continue;
          if (parts[from].rank == group.rank() && parts[to].rank == other) {
            send.push_back({number_of.at({t, from}), parts[to].column});
          }
          if (parts[to].rank == group.rank() && parts[from].rank == other) {
            receive.push_back({number_of.at({t, to}), parts[from].column});
          }
        }
      }
    }
  }
}

void RowNorms::sum(std::vector<at::Tensor>& numbers) const {
  if (!group_) return;
  std::vector<at::Tensor> parts{at::empty({0}, numbers[0].options())};
  Sizes sent;
  Sizes received;
  for (std::size_t r = 0; r < send_.size(); ++r) {
    sent.push_back(0);
    for (const Pair& pair : send_[r]) {
      parts.push_back(numbers[pair.table]);
      sent.back() += numbers[pair.table].numel();
    }
    received.push_back(0);
    for (const Pair& pair : receive_[r]) received.back() += numbers[pair.table].numel();
  }
  const at::Tensor all = comm::all_to_all_v(at::cat(parts), sent, *group_, received);
  std::vector<std::vector<std::pair<std::int64_t, at::Tensor>>> found(numbers.size());
  std::int64_t begin = 0;
  for (const auto& pairs : receive_) {
    for (const Pair& pair : pairs) {
      const std::int64_t count = numbers[pair.table].numel();
      found[pair.table].emplace_back(pair.column, all.narrow(0, begin, count));
      begin += count;
    }
  }
  for (std::size_t t = 0; t < numbers.size(); ++t) {
    if (found[t].empty()) continue;  // whole rows
    std::sort(found[t].begin(), found[t].end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    at::Tensor total = found[t][0].second.clone();
    for (std::size_t i = 1; i < found[t].size(); ++i) total += found[t][i].second;
    numbers[t] = total;
  }
}

}  // namespace tessera::sharding
