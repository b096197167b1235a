// Ids that have arrived become rows, and rows are sent home.

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/Functions.h>

#include "collision/growing_state.h"
#include "sharding/flat_exchange.h"
#include "tessera/jagged/operators.h"

namespace tessera::collision {
namespace {

using sharding::DistContext;
using sharding::Route;
using sharding::Sizes;

/// How many ids the bags of each segment hold; `bags` are their numbers of bags.
Sizes ids_of_segments(const at::Tensor& lengths, const Sizes& bags) {
  const auto* next = lengths.const_data_ptr<std::int32_t>();
  Sizes counts;
  counts.reserve(bags.size());
  for (const std::int64_t count : bags) {
    counts.push_back(std::accumulate(next, next + count, std::int64_t{0}));
    next += count;
  }
  return counts;
}

/// The batch of every segment that arrived: rank by rank, route by route.
Sizes bags_of(const DistContext& context) {
  Sizes bags;
  for (const Sizes& rank : context.batches) bags.insert(bags.end(), rank.begin(), rank.end());
  return bags;
}

}  // namespace

/// What arrived: segment s of [source rank][route], and where its ids and rows begin.
struct GrowingState::Segments {
  Sizes ids;          // of every segment
  Sizes first_id;     // among the ids that arrived
  Sizes first_value;  // of the rows that are sent back, one for every id
  Sizes sent;         // values for every rank
  std::int64_t num_ids = 0;
};

/// The ids that arrived as rows of the tensors, and those of each part that have none.
struct GrowingState::Numbered {
  at::Tensor rows;
  std::vector<UnknownPlaces> places;
  std::vector<std::vector<std::int64_t>> unknown_ids;

  bool has_unknown() const {
    return std::any_of(unknown_ids.begin(), unknown_ids.end(),
                       [](const auto& ids) { return !ids.empty(); });
  }
};

GrowingState::Segments GrowingState::segments_of(const DistContext& context) const {
  const auto& own = layout->routes[index(group.rank())];
  Segments segments;
  segments.ids = ids_of_segments(context.lengths, bags_of(context));
  std::int64_t value = 0;
  for (std::size_t rank = 0; rank < index(group.size()); ++rank) {
    const std::int64_t before = value;
    for (std::size_t r = 0; r < own.size(); ++r) {
      const std::int64_t count = segments.ids[rank * own.size() + r];
      segments.first_id.push_back(segments.num_ids);
      segments.first_value.push_back(value);
      segments.num_ids += count;
      value += count * layout->tables[own[r].table].embedding_dim;
    }
    segments.sent.push_back(value - before);
  }
  return segments;
}

GrowingState::Numbered GrowingState::number_ids(const DistContext& context,
                                                const Segments& segments, bool admits) {
  const std::size_t num_routes = layout->routes[index(group.rank())].size();
  const auto world = index(group.size());
  // Ids of each table by feature, then by rank: the order in which one rank would have them.
  const at::Tensor all_ids = context.ids.to(at::kLong).contiguous();
  const auto* from = all_ids.const_data_ptr<std::int64_t>();
  std::vector<std::vector<std::int64_t>> ids(parts.size());
  std::vector<std::vector<std::int64_t>> rows(parts.size());
  for_all(parts.size(), segments.num_ids, [&](std::size_t p) {
    for (const std::size_t r : parts[p]->routes) {
      for (std::size_t rank = 0; rank < world; ++rank) {
        const std::size_t s = rank * num_routes + r;
        const auto* first = from + segments.first_id[s];
        ids[p].insert(ids[p].end(), first, first + segments.ids[s]);
      }
    }
    rows[p].resize(ids[p].size());
  });
  admit(ids, rows, admits);

  Numbered numbered{at::empty_like(all_ids), std::vector<UnknownPlaces>(parts.size()),
                    std::vector<std::vector<std::int64_t>>(parts.size())};
  auto* to = numbered.rows.data_ptr<std::int64_t>();
  for_all(parts.size(), segments.num_ids, [&](std::size_t p) {
    UnknownPlaces& unknown = numbered.places[p];
    unknown.table = parts[p]->table;
    unknown.columns = parts[p]->config->config.embedding_dim;
    std::size_t next = 0;
    for (const std::size_t r : parts[p]->routes) {
      for (std::size_t rank = 0; rank < world; ++rank) {
        const std::size_t s = rank * num_routes + r;
        for (std::int64_t i = 0; i < segments.ids[s]; ++i, ++next) {
          to[segments.first_id[s] + i] = rows[p][next] + 1;
          if (rows[p][next] >= 0) continue;
          unknown.places.push_back(segments.first_value[s] + i * unknown.columns);
          unknown.buckets.push_back(bucket_of(ids[p][next]));
          numbered.unknown_ids[p].push_back(ids[p][next]);
        }
      }
    }
    if (admits) parts[p]->growth.sightings += static_cast<std::int64_t>(next);
  });
  return numbered;
}

at::Tensor GrowingState::read_unknown(const GrowingPart& part,
                                      const std::vector<std::int64_t>& ids) const {
  const auto count = static_cast<std::int64_t>(ids.size());
  const std::int64_t columns = part.config->config.embedding_dim;
  switch (part.config->unknown) {
    case UnknownIds::kRow:
      return unknown_rows->row(part.table).expand({count, columns}).contiguous();
    case UnknownIds::kZero:
      return at::zeros({count, columns}, at::kFloat);
    case UnknownIds::kInit:
      break;
  }
  return part.first_values(ids);
}

// One rank sees whether all ids have a row, and several of them know it before they look.
bool GrowingState::pools(const Numbered& numbered, bool admits) const {
  if (!pooled_home) return false;
  if (group.size() > 1) return admits;
  return !numbered.has_unknown() && !(admits && trains_unknown);
}

GrowingState::Sent GrowingState::look_up(const DistContext& context, bool admits) {
  if (admits) read_unread();  // of an earlier batch: rows are about to come and go
  const Segments segments = segments_of(context);
  Numbered numbered = number_ids(context, segments, admits);
  embedding::LookupInput input = context.lookup_input();
  input.ids = numbered.rows;
  if (pools(numbered, admits)) {
    embedding::PreparedRows looked_up{.rows = at::empty({0}, at::kFloat)};
    if (batch != nullptr) {
      looked_up = batch->pooled_ahead(input, pooled_home->own_rows(), pooled_home->row_memory());
    }
    return {.pooled = pooled_home->send(context, looked_up)};
  }

  // A rank without rows still takes part.
  at::Tensor read = at::empty({0}, at::kFloat);
  if (batch != nullptr) {
    read = is_by_route ? sequence_by_route(context, numbered.rows) : batch->sequence(input);
  }
  const bool trains = admits && trains_unknown;
  if (trains || numbered.has_unknown()) {
    std::vector<UnknownPlaces> unknown;
    std::vector<at::Tensor> values;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      if (numbered.unknown_ids[p].empty()) continue;
      unknown.push_back(std::move(numbered.places[p]));
      values.push_back(read_unknown(*parts[p], numbered.unknown_ids[p]));
    }
    read = with_unknown(read, std::move(unknown), values, trains ? unknown_rows : nullptr);
  }

  Sizes bags;
  for (const Route& route : routes) bags.push_back(context.strides[route.feature]);
  Sizes sent_ids = ids_of_segments(context.sent.lengths, bags);
  Sizes received;
  std::size_t next = 0;
  for (const auto& theirs : layout->routes) {
    received.push_back(0);
    for (const Route& route : theirs) {
      received.back() += sent_ids[next++] * layout->tables[route.table].embedding_dim;
    }
  }
  return {.rows = sharding::exchange_flat(read, segments.sent, std::move(received), group,
                                          options.codecs, sharding::gradient_factor(group)),
          .ids = std::move(sent_ids)};
}

// Segments lie rank by rank, as they came and go; rows that several features share are summed and
// stepped in the order of one rank: feature by feature.
at::Tensor GrowingState::sequence_by_route(const DistContext& context,
                                           const at::Tensor& numbers) const {
  const auto& own = layout->routes[index(group.rank())];
  const auto world = index(group.size());
  const Sizes bags = bags_of(context);
  const Sizes ids = ids_of_segments(context.lengths, bags);
  const auto id_parts = numbers.split_with_sizes(ids);
  const auto length_parts = context.lengths.split_with_sizes(bags);
  std::vector<at::Tensor> ordered_ids;
  std::vector<at::Tensor> ordered_lengths;
  Sizes num_values;
  embedding::LookupInput input;
  for (std::size_t r = 0; r < own.size(); ++r) {
    for (std::size_t rank = 0; rank < world; ++rank) {
      const std::size_t s = rank * own.size() + r;
      ordered_ids.push_back(id_parts[s]);
      ordered_lengths.push_back(length_parts[s]);
      input.batch_sizes.push_back(bags[s]);
      num_values.push_back(ids[s] * layout->tables[own[r].table].embedding_dim);
    }
  }
  input.ids = at::cat(ordered_ids);
  input.offsets = jagged::lengths_to_offsets(at::cat(ordered_lengths));
  const auto found = batch->sequence(input).split_with_sizes(num_values);
  std::vector<at::Tensor> sent;
  for (std::size_t rank = 0; rank < world; ++rank) {
    for (std::size_t r = 0; r < own.size(); ++r) sent.push_back(found[r * world + rank]);
  }
  return at::cat(sent);
}

std::vector<std::int64_t> GrowingState::places_of(const DistContext& context, std::size_t output,
                                                  const Sizes& ids) const {
  const std::size_t place = context.places[layout->outputs[output].feature];
  const std::int64_t first = context.features.offset_per_key()[place];
  std::vector<std::int64_t> places(index(context.features.length_per_key()[place]));
  const auto* source =
      context.sent.source.defined() ? context.sent.source.const_data_ptr<std::int64_t>() : nullptr;
  std::int64_t id = 0;
  std::int64_t value = 0;
  for (std::size_t s = 0; s < routes.size(); ++s) {
    const std::int64_t columns = layout->tables[routes[s].table].embedding_dim;
    if (routes[s].output == output) {
      for (std::int64_t i = 0; i < ids[s]; ++i) {
        const std::int64_t given = source == nullptr ? id + i : source[id + i];
        places[index(given - first)] = value + i * columns;
      }
    }
    id += ids[s];
    value += ids[s] * columns;
  }
  return places;
}

}  // namespace tessera::collision
