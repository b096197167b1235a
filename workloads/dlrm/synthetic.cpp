#include "dlrm/synthetic.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>

namespace tessera::workloads::dlrm {
namespace {

// Samples made together: feature by feature in plain loops that the compiler turns into vectors.
constexpr std::int64_t kChunk = 256;
constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15ULL;
constexpr std::int64_t kFactors = 4;
constexpr std::int64_t kCounts = 1024;  // different dense numbers

// The output function of SplitMix64: a bijection that leaves no trace of its input.
inline std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

inline double unit(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

// log2 and exp2 to about 1e-11, in operations that are rounded alike everywhere: the same log on
// every machine, and fast.
inline double log2_of(double x) {
  const auto bits = std::bit_cast<std::uint64_t>(x);
  // Shifts the cut between exponents to sqrt(1/2), so that the mantissa is near 1.
  const std::uint64_t shifted = bits - 0x3fe6a09e667f3bcdULL;
  const auto exponent = static_cast<std::int64_t>(shifted) >> 52;
  const double m = std::bit_cast<double>(bits - (static_cast<std::uint64_t>(exponent) << 52));
  const double t = (m - 1) / (m + 1);
  const double s = t * t;
  const double series =
      1 + s * (1. / 3 + s * (1. / 5 + s * (1. / 7 + s * (1. / 9 + s * (1. / 11)))));
  return static_cast<double>(static_cast<std::int32_t>(exponent)) +
         2 * 1.4426950408889634 * t * series;
}

inline double exp2_of(double x) {
  const auto whole = static_cast<std::int32_t>(x + (x < 0 ? -0.5 : 0.5));
  const double f = (x - whole) * 0.6931471805599453;
  const double series =
      1 + f * (1 + f * (1. / 2 +
                        f * (1. / 6 +
                             f * (1. / 24 +
                                  f * (1. / 120 + f * (1. / 720 + f * (1. / 5040 + f / 40320)))))));
  const auto exponent = static_cast<std::uint64_t>(static_cast<std::int64_t>(whole) + 1023) << 52;
  return series * std::bit_cast<double>(exponent);
}

inline double sigmoid(double x) {
  return 1 / (1 + exp2_of(-1.4426950408889634 * std::clamp(x, -60., 60.)));
}

void require(bool condition, const std::string& message) {
  if (!condition) throw DataError("synthetic: " + message);
}

}  // namespace

/// What is the same for all samples.
struct SyntheticLog::Plan {
  struct Table {
    std::uint64_t num_rows = 0;
    std::uint64_t reciprocal = 0;  // 2^64 / num_rows, rounded down
    std::uint64_t multiplier = 1;  // no common factor with num_rows: scatters the ranks
    std::uint64_t seed = 0;        // of effects and factors
    std::uint64_t slot = 0;        // first draw of the feature in a sample's sequence
    std::int64_t bag_size = 0;     // 0: varies
    double spread = 0;             // (num_rows + 1)^(1 - exponent) - 1, or log2 for exponent 1
    float norm = 1;                // 1 / sqrt(ids expected per bag)
  };
  // The sums of a chunk that make the logits.
  struct Sums {
    std::array<float, kChunk> effect;
    std::array<std::array<float, kChunk>, kFactors> factor;
    std::array<float, kChunk> squares;
  };
  // Room for the ids of one feature of a chunk.
  struct Draws {
    std::vector<std::uint64_t> rank;
    std::vector<double> unit;
  };

  SyntheticOptions options;
  std::vector<Table> tables;
  std::uint64_t seed = 0;
  std::vector<float> dense_weights;
  std::array<std::int32_t, kCounts> count{};
  std::array<float, kCounts> log_count{};     // log(1 + count)
  std::array<float, kCounts> normal_count{};  // the same with mean 0 and variance 1
  double effect_unit = 0;
  double factor_unit = 0;
  double inverse_power = 0;  // 1 / (1 - exponent)

  explicit Plan(const SyntheticOptions& given);
  void plan_dense();
  void plan_tables();

  std::uint64_t sample_seed(std::int64_t sample) const {
    return mix(seed + static_cast<std::uint64_t>(sample) * kGolden);
  }
  static std::uint64_t draw(std::uint64_t sample_seed, std::uint64_t slot) {
    return mix(sample_seed + slot * kGolden);
  }
  std::int64_t count_index(std::uint64_t sample_seed, std::int64_t dense) const {
    const std::uint64_t bits = draw(sample_seed, 1 + static_cast<std::uint64_t>(dense) / 4);
    return static_cast<std::int64_t>(bits >> (16 * (dense % 4))) & (kCounts - 1);
  }

  void draw_ranks(const Table& table, std::int64_t count, Draws& draws) const;
  void add_feature(const Table& table, const std::uint64_t* seeds, std::int64_t count,
                   const std::int32_t* lengths, std::int64_t* ids, Sums& sums, Draws& draws) const;
  void draw_lengths(const std::uint64_t* seeds, std::int64_t count, std::int64_t stride,
                    std::int32_t* lengths) const;
  void make_chances(const std::uint64_t* seeds, std::int64_t count, const Sums& sums,
                    float* chances) const;
  void make_chunk(std::int64_t first, std::int64_t count, const std::int32_t* lengths,
                  std::int64_t stride, std::vector<std::int64_t*>& ids, float* chances,
                  Draws& draws) const;
};

SyntheticLog::Plan::Plan(const SyntheticOptions& given) : options(given) {
  require(options.schema.num_dense >= 0, "the number of dense features is below 0.");
  require(options.zipf_exponent >= 0 && options.zipf_exponent <= 4,
          "the Zipf exponent must be from 0 to 4.");
  require(options.largest_bag >= 1 && options.largest_bag <= 1000000,
          "the largest bag must hold 1 to 1000000 ids.");
  require(options.dense_scale >= 0 && options.effect_scale >= 0 && options.factor_scale >= 0,
          "a scale is below 0.");
  require(std::isfinite(options.dense_scale + options.effect_scale + options.factor_scale +
                        options.bias),
          "a scale or the bias is not a finite number.");
  seed = mix(options.seed + kGolden);
  plan_dense();
  plan_tables();
}

void SyntheticLog::Plan::plan_dense() {
  double mean = 0;
  double square = 0;
  for (std::int64_t i = 0; i < kCounts; ++i) {
    const double quantile = (static_cast<double>(i) + 0.5) / kCounts;
    const auto at = static_cast<std::size_t>(i);
    count[at] = static_cast<std::int32_t>(exp2_of(10 * quantile)) - 1;
    log_count[at] = std::log1p(static_cast<float>(count[at]));
    mean += log_count[at] / kCounts;
    square += static_cast<double>(log_count[at]) * log_count[at] / kCounts;
  }
  const double deviation = std::sqrt(square - mean * mean);
  for (std::size_t i = 0; i < count.size(); ++i) {
    normal_count[i] = static_cast<float>((log_count[i] - mean) / deviation);
  }
  double sum = 0;
  for (std::int64_t d = 0; d < options.schema.num_dense; ++d) {
    const double weight = 2 * unit(mix(seed + 0x10000 + static_cast<std::uint64_t>(d))) - 1;
    dense_weights.push_back(static_cast<float>(weight));
    sum += weight * weight;
  }
  for (float& weight : dense_weights) {
    weight *= static_cast<float>(options.dense_scale / std::sqrt(sum));
  }
}

void SyntheticLog::Plan::plan_tables() {
  const double power = 1 - options.zipf_exponent;
  const bool is_log = std::abs(power) < 1e-9;
  inverse_power = is_log ? 0 : 1 / power;
  auto slot = static_cast<std::uint64_t>(2 + options.schema.num_dense / 4);
  for (const Feature& feature : options.schema.features) {
    require(feature.num_rows >= 1 && feature.num_rows < (std::int64_t{1} << 31),
            "feature '" + feature.name + "' has " + std::to_string(feature.num_rows) +
                " rows; 1 to 2147483647 can be drawn from.");
    require(feature.bag_size >= 0 && feature.bag_size <= 1000000,
            "feature '" + feature.name + "' has bags of " + std::to_string(feature.bag_size) +
                " ids; 0 (varies) to 1000000 can be made.");
    Table table;
    table.num_rows = static_cast<std::uint64_t>(feature.num_rows);
    table.reciprocal = ~std::uint64_t{0} / table.num_rows;
    table.multiplier = table.num_rows * 618 / 1000 + 1;
    while (std::gcd(table.multiplier, table.num_rows) != 1) ++table.multiplier;
    table.seed = mix(seed + 0x20000 + tables.size());
    table.slot = slot;
    table.bag_size = feature.bag_size;
    const auto rows = static_cast<double>(table.num_rows);
    table.spread = is_log ? log2_of(rows + 1) : exp2_of(power * log2_of(rows + 1)) - 1;
    const double expected = feature.bag_size > 0 ? static_cast<double>(feature.bag_size)
                                                 : static_cast<double>(options.largest_bag) / 2;
    table.norm = static_cast<float>(1 / std::sqrt(expected));
    const std::int64_t most = feature.bag_size > 0 ? feature.bag_size : options.largest_bag;
    slot += 1 + static_cast<std::uint64_t>(most);
    tables.push_back(table);
  }
  const auto n = static_cast<double>(tables.size());
  // An effect is uniform in [-1, 1], variance 1/3; a factor is -1 or 1.
  effect_unit = n > 0 ? options.effect_scale / std::sqrt(n / 3) : 0;
  factor_unit = n > 1 ? options.factor_scale / std::sqrt(kFactors * n * (n - 1) / 2) : 0;
}

void SyntheticLog::Plan::draw_ranks(const Table& table, std::int64_t count, Draws& draws) const {
  double* u = draws.unit.data();
  if (inverse_power == 0) {
    for (std::int64_t i = 0; i < count; ++i) u[i] = exp2_of(u[i] * table.spread);
  } else {
    const double power = inverse_power;
    for (std::int64_t i = 0; i < count; ++i) {
      u[i] = exp2_of(log2_of(1 + u[i] * table.spread) * power);
    }
  }
  const auto last = static_cast<double>(table.num_rows);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto x = static_cast<std::int64_t>(std::min(u[i], last));
    draws.rank[static_cast<std::size_t>(i)] =
        static_cast<std::uint64_t>(std::max<std::int64_t>(x, 1) - 1);
  }
}

void SyntheticLog::Plan::add_feature(const Table& table, const std::uint64_t* seeds,
                                     std::int64_t count, const std::int32_t* lengths,
                                     std::int64_t* ids, Sums& sums, Draws& draws) const {
  std::int64_t num_ids = 0;
  for (std::int64_t s = 0; s < count; ++s) num_ids += lengths[s];
  if (static_cast<std::int64_t>(draws.unit.size()) < num_ids) {
    draws.unit.resize(static_cast<std::size_t>(num_ids));
    draws.rank.resize(static_cast<std::size_t>(num_ids));
  }
  std::int64_t at = 0;
  for (std::int64_t s = 0; s < count; ++s) {
    for (std::int32_t k = 0; k < lengths[s]; ++k) {
      draws.unit[static_cast<std::size_t>(at++)] =
          unit(draw(seeds[s], table.slot + 1 + static_cast<std::uint64_t>(k)));
    }
  }
  draw_ranks(table, num_ids, draws);
  const std::uint64_t* rank = draws.rank.data();
  if (ids != nullptr) {
    for (std::int64_t i = 0; i < num_ids; ++i) {
      const std::uint64_t product = rank[i] * table.multiplier;
      const auto quotient = static_cast<std::uint64_t>(
          (static_cast<unsigned __int128>(product) * table.reciprocal) >> 64);
      std::uint64_t row = product - quotient * table.num_rows;
      row -= row >= table.num_rows ? table.num_rows : 0;
      ids[i] = static_cast<std::int64_t>(row);
    }
  }
  at = 0;
  for (std::int64_t s = 0; s < count; ++s) {
    float effect = 0;
    std::array<float, kFactors> factor{};
    for (std::int32_t k = 0; k < lengths[s]; ++k) {
      const std::uint64_t hidden = mix(table.seed + rank[at++] * kGolden);
      effect += static_cast<float>(static_cast<std::int32_t>(hidden >> 32)) * 0x1p-31F;
      for (std::size_t j = 0; j < kFactors; ++j) {
        factor[j] += static_cast<float>(1 - 2 * static_cast<std::int32_t>((hidden >> j) & 1));
      }
    }
    const auto i = static_cast<std::size_t>(s);
    sums.effect[i] += effect * table.norm;
    for (std::size_t j = 0; j < kFactors; ++j) {
      const float value = factor[j] * table.norm;
      sums.factor[j][i] += value;
      sums.squares[i] += value * value;
    }
  }
}

void SyntheticLog::Plan::draw_lengths(const std::uint64_t* seeds, std::int64_t count,
                                      std::int64_t stride, std::int32_t* lengths) const {
  const auto sizes = static_cast<std::uint64_t>(options.largest_bag) + 1;
  for (std::size_t f = 0; f < tables.size(); ++f) {
    std::int32_t* out = lengths + static_cast<std::int64_t>(f) * stride;
    if (tables[f].bag_size > 0) {
      std::fill_n(out, count, static_cast<std::int32_t>(tables[f].bag_size));
      continue;
    }
    for (std::int64_t s = 0; s < count; ++s) {
      out[s] = static_cast<std::int32_t>((draw(seeds[s], tables[f].slot) >> 32) * sizes >> 32);
    }
  }
}

void SyntheticLog::Plan::make_chances(const std::uint64_t* seeds, std::int64_t count,
                                      const Sums& sums, float* chances) const {
  const std::int64_t num_dense = options.schema.num_dense;
  for (std::int64_t s = 0; s < count; ++s) {
    const auto i = static_cast<std::size_t>(s);
    double logit = options.bias + effect_unit * sums.effect[i];
    double square = 0;
    for (const auto& factor : sums.factor) square += static_cast<double>(factor[i]) * factor[i];
    logit += factor_unit * (square - sums.squares[i]) / 2;
    for (std::int64_t d = 0; d < num_dense; ++d) {
      logit += dense_weights[static_cast<std::size_t>(d)] *
               normal_count[static_cast<std::size_t>(count_index(seeds[s], d))];
    }
    chances[s] = static_cast<float>(sigmoid(logit));
  }
}

// `ids` has a place per feature, moved on by what was written; empty if ids are not wanted.
void SyntheticLog::Plan::make_chunk(std::int64_t first, std::int64_t count,
                                    const std::int32_t* lengths, std::int64_t stride,
                                    std::vector<std::int64_t*>& ids, float* chances,
                                    Draws& draws) const {
  std::array<std::uint64_t, kChunk> seeds;
  for (std::int64_t s = 0; s < count; ++s) {
    seeds[static_cast<std::size_t>(s)] = sample_seed(first + s);
  }
  Sums sums{};
  for (std::size_t f = 0; f < tables.size(); ++f) {
    const std::int32_t* bags = lengths + static_cast<std::int64_t>(f) * stride;
    std::int64_t* out = ids.empty() ? nullptr : ids[f];
    add_feature(tables[f], seeds.data(), count, bags, out, sums, draws);
    if (out != nullptr) ids[f] += std::accumulate(bags, bags + count, std::int64_t{0});
  }
  make_chances(seeds.data(), count, sums, chances);
}

SyntheticLog::SyntheticLog(const SyntheticOptions& options)
    : plan_(std::make_unique<const Plan>(options)) {}

SyntheticLog::~SyntheticLog() = default;

const ClickSchema& SyntheticLog::schema() const noexcept { return plan_->options.schema; }

std::int64_t SyntheticLog::num_samples() const noexcept { return plan_->options.num_samples; }

void SyntheticLog::read(std::int64_t first, std::int64_t count, SampleBlock& block) const {
  check_range(*this, first, count, "synthetic");
  const auto num_features = static_cast<std::int64_t>(plan_->tables.size());
  const std::int64_t num_dense = plan_->options.schema.num_dense;
  block.num_samples = count;
  block.labels.resize(static_cast<std::size_t>(count));
  block.dense.resize(static_cast<std::size_t>(count * num_dense));
  block.lengths.resize(static_cast<std::size_t>(count * num_features));
  std::array<std::uint64_t, kChunk> seeds;
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t part = std::min(kChunk, count - begin);
    for (std::int64_t s = 0; s < part; ++s) {
      const std::uint64_t seed = plan_->sample_seed(first + begin + s);
      seeds[static_cast<std::size_t>(s)] = seed;
      for (std::int64_t d = 0; d < num_dense; ++d) {
        block.dense[static_cast<std::size_t>((begin + s) * num_dense + d)] =
            plan_->log_count[static_cast<std::size_t>(plan_->count_index(seed, d))];
      }
    }
    plan_->draw_lengths(seeds.data(), part, count, block.lengths.data() + begin);
  }
  std::vector<std::int64_t> begins(1, 0);
  for (std::int64_t f = 0; f < num_features; ++f) {
    const std::int32_t* bags = block.lengths.data() + f * count;
    begins.push_back(begins.back() + std::accumulate(bags, bags + count, std::int64_t{0}));
  }
  block.ids.resize(static_cast<std::size_t>(begins.back()));
  std::vector<std::int64_t*> places;
  for (std::int64_t f = 0; f < num_features; ++f) {
    places.push_back(block.ids.data() + begins[static_cast<std::size_t>(f)]);
  }
  Plan::Draws draws;
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t part = std::min(kChunk, count - begin);
    float* labels = block.labels.data() + begin;
    plan_->make_chunk(first + begin, part, block.lengths.data() + begin, count, places, labels,
                      draws);
    for (std::int64_t s = 0; s < part; ++s) {
      const std::uint64_t bits = Plan::draw(plan_->sample_seed(first + begin + s), 0);
      labels[s] = unit(bits) < labels[s] ? 1.0F : 0.0F;
    }
  }
}

void SyntheticLog::counts(std::int64_t sample, std::span<std::int32_t> counts) const {
  const std::uint64_t seed = plan_->sample_seed(sample);
  for (std::size_t d = 0; d < counts.size(); ++d) {
    counts[d] = plan_->count[static_cast<std::size_t>(
        plan_->count_index(seed, static_cast<std::int64_t>(d)))];
  }
}

void SyntheticLog::chances(std::int64_t first, std::span<float> chances) const {
  const auto count = static_cast<std::int64_t>(chances.size());
  check_range(*this, first, count, "synthetic");
  std::vector<std::int32_t> lengths(plan_->tables.size() * kChunk);
  std::vector<std::int64_t*> no_ids;
  std::array<std::uint64_t, kChunk> seeds;
  Plan::Draws draws;
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t part = std::min(kChunk, count - begin);
    for (std::int64_t s = 0; s < part; ++s) {
      seeds[static_cast<std::size_t>(s)] = plan_->sample_seed(first + begin + s);
    }
    plan_->draw_lengths(seeds.data(), part, kChunk, lengths.data());
    plan_->make_chunk(first + begin, part, lengths.data(), kChunk, no_ids, chances.data() + begin,
                      draws);
  }
}

Ceiling SyntheticLog::ceiling(std::int64_t count, std::int64_t first) const {
  std::vector<float> p(static_cast<std::size_t>(count));
  chances(first, p);
  std::ranges::sort(p);
  Ceiling result;
  result.num_samples = count;
  double entropy = 0;
  double clicks = 0;
  double others = 0;
  double own_pairs = 0;
  double ordered = 0;
  // Pairs (i, j) weigh p_i (1 - p_j): i clicked, j did not. Equal chances count half; a sample
  // makes no pair with itself.
  for (std::size_t begin = 0; begin < p.size();) {
    std::size_t end = begin;
    const double chance = p[begin];
    while (end < p.size() && p[end] == p[begin]) ++end;
    const auto ties = static_cast<double>(end - begin);
    ordered += ties * chance * (others + 0.5 * (ties - 1) * (1 - chance));
    others += ties * (1 - chance);
    clicks += ties * chance;
    own_pairs += ties * chance * (1 - chance);
    entropy -= ties * (chance * std::log(chance) + (1 - chance) * std::log1p(-chance));
    begin = end;
  }
  const auto n = static_cast<double>(count);
  result.auc = ordered / (clicks * others - own_pairs);
  result.log_loss = entropy / n;
  result.click_rate = clicks / n;
  const double rate = result.click_rate;
  result.normalised_entropy =
      result.log_loss / -(rate * std::log(rate) + (1 - rate) * std::log1p(-rate));
  return result;
}

}  // namespace tessera::workloads::dlrm
