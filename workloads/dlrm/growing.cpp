#include "dlrm/growing.h"

#include <nlohmann/json.hpp>

#include "data/schema.h"
#include "report/html.h"
#include "tessera/collision/id_policy.h"
#include "tessera/sharding/plan.h"

namespace tessera::workloads::dlrm {
namespace {

// Steps between two counts: a small message that nobody should notice.
constexpr std::int64_t kCountEvery = 20;

// Tables of one seed begin with other rows.
std::uint64_t seed_of(std::uint64_t seed, const std::string& table) {
  std::uint64_t hash = 0xCBF29CE484222325U;
  for (const char letter : table)
    hash = (hash ^ static_cast<std::uint8_t>(letter)) * 0x100000001B3U;
  return (seed * 0x9e3779b97f4a7c15U) ^ hash;
}

double rate(std::int64_t part, std::int64_t all) {
  return all == 0 ? 0 : static_cast<double>(part) / static_cast<double>(all);
}

}  // namespace

std::vector<collision::GrowingTable> growing_tables(const Settings& settings,
                                                    const ClickSchema& schema) {
  std::vector<collision::GrowingTable> tables;
  for (const Feature& feature : schema.features) {
    collision::GrowingTable table;
    table.config.name = feature.name;
    table.config.embedding_dim = feature.dim_or(settings.embedding_dim);
    table.config.feature_names = {feature.name};
    if (feature.means) table.config.pooling = embedding::PoolingType::kMean;
    table.ids.capacity = settings.id_capacity;
    table.ids.admission = collision::admission_of(settings.id_admission);
    table.ids.admission.seed = static_cast<std::uint64_t>(settings.seed);
    table.ids.eviction = collision::eviction_of(settings.id_eviction);
    // Ids of one batch do not evict each other: what finds no room waits for its next sighting.
    table.ids.refuse_when_full = settings.id_eviction != "none";
    table.unknown = settings.id_default == "zero"   ? collision::UnknownIds::kZero
                    : settings.id_default == "init" ? collision::UnknownIds::kInit
                                                    : collision::UnknownIds::kRow;
    if (!feature.grows() && !settings.is_unlimited()) {
      // As many rows as the schema says, each from the start with its first values: a fixed table.
      table.ids = {};
      table.unknown = collision::UnknownIds::kInit;
    }
    table.text_hash = std::string(data::kTextHashName);
    table.seed = seed_of(static_cast<std::uint64_t>(settings.seed), feature.name);
    tables.push_back(std::move(table));
  }
  return tables;
}

std::map<std::string, sharding::Placement> growing_placements(const Settings& settings,
                                                              const ClickSchema& schema,
                                                              int num_ranks) {
  std::map<std::string, sharding::Placement> wishes;
  int next = 0;
  for (const Feature& feature : schema.features) {
    const bool is_whole = settings.sharding == "table_wise";
    wishes.emplace(feature.name,
                   is_whole ? sharding::table_wise(next++ % num_ranks) : sharding::row_wise());
  }
  return wishes;
}

void GrowthWatch::follow() {
  if (num_followed_++ % kCountEvery == 0) count();
}

void GrowthWatch::count() {
  before_ = num_ids();
  now_ = tables_->total_growth();
}

std::int64_t GrowthWatch::num_ids() const {
  std::int64_t ids = 0;
  for (const collision::Growth& table : now_) ids += table.ids;
  return ids;
}

std::string GrowthWatch::text() const {
  const std::int64_t more = num_ids() - before_;
  return "ids " + report::short_number(static_cast<double>(num_ids())) + " (" +
         (more < 0 ? "" : "+") + report::short_number(static_cast<double>(more)) + ")";
}

std::string GrowthWatch::record() const {
  nlohmann::ordered_json line{{"kind", "growth"}, {"ids", num_ids()}};
  for (const collision::Growth& table : now_) {
    line["tables"].push_back({{"name", table.table},
                              {"ids", table.ids},
                              {"admitted", table.admitted},
                              {"refused", table.refused},
                              {"evicted", table.evicted},
                              {"hit_rate", rate(table.hits, table.sightings)},
                              {"bytes", table.bytes}});
  }
  if (texts_) {
    const TextCheck::Found found = texts_->found();
    line["texts"] = {{"seen", found.texts}, {"clashes", found.clashes}};
  }
  return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

trainer::Figures GrowthWatch::figures() const {
  collision::Growth all;
  for (const collision::Growth& table : now_) {
    all.ids += table.ids;
    all.admitted += table.admitted;
    all.refused += table.refused;
    all.evicted += table.evicted;
    all.hits += table.hits;
    all.sightings += table.sightings;
    all.bytes += table.bytes;
  }
  trainer::Figures figures{{"ids", static_cast<double>(all.ids)},
                           {"ids_admitted", static_cast<double>(all.admitted)},
                           {"ids_refused", static_cast<double>(all.refused)},
                           {"ids_evicted", static_cast<double>(all.evicted)},
                           {"id_hit_rate", rate(all.hits, all.sightings)},
                           {"id_bytes", static_cast<double>(all.bytes)}};
  if (texts_) {
    const TextCheck::Found found = texts_->found();
    figures.emplace_back("texts", static_cast<double>(found.texts));
    figures.emplace_back("text_clashes", static_cast<double>(found.clashes));
  }
  return figures;
}

}  // namespace tessera::workloads::dlrm
