#include "tessera/planner/id_statistics.h"

#include <algorithm>
#include <cmath>

#include "planner/json.h"
#include "tessera/planner/plan_error.h"

namespace tessera::planner {
namespace {

using json::Json;
using json::Place;

constexpr std::size_t kExact = std::size_t{1} << 20;  // distinct ids that are counted one by one
constexpr int kRegisterBits = 14;
constexpr std::size_t kMostHot = 1024;
constexpr std::int64_t kRanges = 1024;
constexpr std::int64_t kFirstPoint = 256;

// splitmix64: any id, however it was made, gets bits as if thrown.
std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

// Ids and how often they came: a table of slots, at most half full.
class Counts {
 public:
  /// Whether the id is counted; ids that are new when it is full are not.
  bool add(std::int64_t id) {
    if (2 * size_ >= slots_.size() && slots_.size() < 2 * kExact) grow();
    for (std::size_t at = mixed(static_cast<std::uint64_t>(id)) & (slots_.size() - 1);;
         at = (at + 1) & (slots_.size() - 1)) {
      Slot& slot = slots_[at];
      if (slot.count > 0 && slot.id != id) continue;
      if (slot.count == 0) {
        if (size_ == kExact) return false;
        ++size_;
        slot.id = id;
      }
      ++slot.count;
      return true;
    }
  }
  std::size_t size() const { return size_; }
  bool is_full() const { return size_ == kExact; }

  /// Hottest first; ties by id.
  std::vector<std::pair<std::int64_t, double>> sorted() const {
    std::vector<std::pair<std::int64_t, double>> all;
    for (const Slot& slot : slots_) {
      if (slot.count > 0) all.emplace_back(slot.id, static_cast<double>(slot.count));
    }
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
      return a.second != b.second ? a.second > b.second : a.first < b.first;
    });
    return all;
  }

 private:
  struct Slot {
    std::int64_t id = 0;
    std::int64_t count = 0;
  };

  void grow() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.count == 0) continue;
      std::size_t at = mixed(static_cast<std::uint64_t>(slot.id)) & (slots_.size() - 1);
      while (slots_[at].count > 0) at = (at + 1) & (slots_.size() - 1);
      slots_[at] = slot;
    }
  }

  std::vector<Slot> slots_ = std::vector<Slot>(1024);
  std::size_t size_ = 0;
};

// How many distinct ids there were, from the longest runs of zeros of their hashes.
class Registers {
 public:
  void add(std::int64_t id) {
    const std::uint64_t hash = mixed(static_cast<std::uint64_t>(id) ^ 0x5bf03635f0a5b1a3U);
    const std::uint64_t rest = (hash << kRegisterBits) | (std::uint64_t{1} << (kRegisterBits - 1));
    auto& most = most_[hash >> (64 - kRegisterBits)];
    most = std::max<std::uint8_t>(most, static_cast<std::uint8_t>(__builtin_clzll(rest) + 1));
  }
  double count() const {
    const auto size = static_cast<double>(most_.size());
    double sum = 0;
    int zeros = 0;
    for (const std::uint8_t one : most_) {
      sum += std::ldexp(1.0, -one);
      zeros += one == 0 ? 1 : 0;
    }
    const double estimate = 0.7213 / (1 + 1.079 / size) * size * size / sum;
    return estimate <= 2.5 * size && zeros > 0 ? size * std::log(size / zeros) : estimate;
  }

 private:
  std::vector<std::uint8_t> most_ = std::vector<std::uint8_t>(std::size_t{1} << kRegisterBits);
};

// Slope of log count over log rank, of ranks spread evenly in the logarithm.
std::pair<double, double> zipf_of(const std::vector<std::pair<std::int64_t, double>>& sorted) {
  std::vector<std::pair<double, double>> points;
  for (double rank = 1; rank <= static_cast<double>(sorted.size()); rank *= 1.25) {
    const auto at = static_cast<std::size_t>(rank);
    if (sorted[at - 1].second < 16) break;  // chance rules
    if (!points.empty() && points.back().first == std::log(static_cast<double>(at))) continue;
    points.emplace_back(std::log(static_cast<double>(at)), std::log(sorted[at - 1].second));
  }
  const auto count = static_cast<double>(points.size());
  if (points.size() < 4) return {0, 0};
  double x1 = 0, y1 = 0, xx = 0, xy = 0;
  for (const auto& [x, y] : points) {
    x1 += x / count;
    y1 += y / count;
  }
  for (const auto& [x, y] : points) {
    xx += (x - x1) * (x - x1);
    xy += (x - x1) * (y - y1);
  }
  const double slope = xy / xx;
  double errors = 0;
  for (const auto& [x, y] : points) {
    const double off = y - y1 - slope * (x - x1);
    errors += off * off;
  }
  return {-slope, std::sqrt(errors / (count - 2) / xx)};
}

Json pairs_value(const std::vector<std::pair<double, double>>& points) {
  Json list = Json::array();
  for (const auto& [x, y] : points) list.push_back({x, y});
  return list;
}

std::vector<std::pair<double, double>> pairs_at(const Place& place) {
  std::vector<std::pair<double, double>> points;
  for (std::size_t i = 0; i < place.size(); ++i) {
    const Place point = place[i];
    if (point.size() != 2) point.refuse("is not a pair of numbers");
    const std::pair<double, double> next{point[std::size_t{0}].number(0, 1e18),
                                         point[std::size_t{1}].number(0, 1e18)};
    if (!points.empty() &&
        (next.first <= points.back().first || next.second < points.back().second)) {
      point.refuse("does not rise");
    }
    points.push_back(next);
  }
  return points;
}

// Share of the lookups of rows below each row, from the ranges, whose hottest ids are counted by
// themselves.
std::vector<std::pair<double, double>> ids_below(const IdStatistics& one) {
  std::vector<std::pair<double, double>> points;
  double sum = 0;
  const auto rows = static_cast<double>(one.rows);
  const auto num_ranges = static_cast<double>(one.ranges.size());
  std::vector<std::pair<std::int64_t, double>> hot = one.hottest;
  std::sort(hot.begin(), hot.end());
  auto next = hot.begin();
  for (std::size_t k = 0; k < one.ranges.size(); ++k) {
    const double begin = std::ceil(static_cast<double>(k) * rows / num_ranges);
    const double end = std::ceil(static_cast<double>(k + 1) * rows / num_ranges);
    const auto first = next;
    double others = one.ranges[k];
    for (; next != hot.end() && static_cast<double>(next->first) < end; ++next) {
      others -= next->second;
    }
    const double cold = end - begin - static_cast<double>(next - first);
    const double each = cold > 0 ? std::max(0.0, others) / cold : 0;
    double row = begin;
    for (auto id = first; id != next; ++id) {
      const auto at = static_cast<double>(id->first);
      if (at < row) continue;  // twice in the file
      sum += each * (at - row);
      if (at > row) points.emplace_back(at, sum);
      sum += id->second;
      row = at + 1;
      points.emplace_back(row, sum);
    }
    sum += each * (end - row);
    if (end > row) points.emplace_back(end, sum);
  }
  if (!(sum > 0)) return {};
  for (auto& [row, below] : points) below = std::min(1.0, below / sum);
  points.back() = {rows, 1};
  return points;
}

}  // namespace

struct IdCounter::State {
  IdStatistics found;
  std::map<std::int64_t, std::int64_t> lengths;  // ids of a sample: samples
  Counts counts;
  Registers registers;
  bool was_full = false;
  std::int64_t lookups = 0;
  std::int64_t next_point = kFirstPoint;

  double distinct() const {
    // The registers know nothing better while all are counted.
    return was_full ? std::max(static_cast<double>(counts.size()), registers.count())
                    : static_cast<double>(counts.size());
  }
};

IdCounter::IdCounter(std::string name, std::int64_t rows) : state_(std::make_unique<State>()) {
  state_->found.name = std::move(name);
  state_->found.rows = std::max<std::int64_t>(1, rows);
  state_->found.ranges.resize(static_cast<std::size_t>(std::min(kRanges, state_->found.rows)));
}
IdCounter::~IdCounter() = default;
IdCounter::IdCounter(IdCounter&&) noexcept = default;
IdCounter& IdCounter::operator=(IdCounter&&) noexcept = default;

void IdCounter::add(const std::int64_t* ids, std::int64_t count) {
  State& state = *state_;
  ++state.lengths[count];
  const auto num_ranges = static_cast<double>(state.found.ranges.size());
  for (std::int64_t i = 0; i < count; ++i) {
    const auto share = static_cast<double>(ids[i]) / static_cast<double>(state.found.rows);
    state.found
        .ranges[static_cast<std::size_t>(std::clamp(share * num_ranges, 0.0, num_ranges - 1))] += 1;
    if (!state.counts.add(ids[i])) state.was_full = true;
    state.registers.add(ids[i]);
    if (++state.lookups == state.next_point) {
      state.found.curve.emplace_back(static_cast<double>(state.lookups), state.distinct());
      // 256, 384, 512, 768, …: straight lines between powers of two alone are up to 3 % too low.
      const bool is_power = (state.next_point & (state.next_point - 1)) == 0;
      state.next_point = is_power ? state.next_point / 2 * 3 : state.next_point / 3 * 4;
    }
  }
}

IdStatistics IdCounter::finish() const {
  const State& state = *state_;
  IdStatistics found = state.found;
  found.ids = static_cast<double>(state.lookups);
  for (const auto& [length, samples] : state.lengths) found.samples += static_cast<double>(samples);
  const auto quantile = [&](double share) {
    double seen = 0;
    for (const auto& [length, samples] : state.lengths) {
      seen += static_cast<double>(samples);
      if (seen >= share * found.samples) return static_cast<double>(length);
    }
    return 0.0;
  };
  if (found.samples > 0) {
    found.mean = found.ids / found.samples;
    found.median = quantile(0.5);
    found.p99 = quantile(0.99);
    found.most = static_cast<double>(state.lengths.rbegin()->first);
    const auto empty = state.lengths.find(0);
    if (empty != state.lengths.end()) {
      found.empty_share = static_cast<double>(empty->second) / found.samples;
    }
  }
  found.distinct = state.distinct();
  if (state.lookups > 0 && (found.curve.empty() || found.curve.back().first < found.ids)) {
    found.curve.emplace_back(found.ids, found.distinct);
  }
  // An estimate may fall below the one before it; a curve may not.
  double most = 0;
  for (auto& [lookups, distinct] : found.curve) {
    distinct = most = std::max(most, std::min(distinct, lookups));
  }
  const auto sorted = state.counts.sorted();
  double sum = 0;
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    sum += sorted[i].second;
    if (((i + 1) & i) == 0) {
      found.hotness.emplace_back(static_cast<double>(i + 1), sum / found.ids);
    }
  }
  found.hottest.assign(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(
                                                            std::min(kMostHot, sorted.size())));
  std::tie(found.zipf, found.zipf_error) = zipf_of(sorted);
  return found;
}

std::string to_json(const std::vector<IdStatistics>& features) {
  Json list = Json::array();
  for (const IdStatistics& one : features) {
    Json hottest = Json::array();
    for (const auto& [id, count] : one.hottest) hottest.push_back({id, count});
    list.push_back(
        {{"name", one.name},
         {"rows", one.rows},
         {"samples", one.samples},
         {"ids", one.ids},
         {"ids_per_sample",
          {{"mean", one.mean}, {"median", one.median}, {"p99", one.p99}, {"most", one.most}}},
         {"empty_share", one.empty_share},
         {"distinct", one.distinct},
         {"zipf", one.zipf},
         {"zipf_error", one.zipf_error},
         {"curve", pairs_value(one.curve)},
         {"hotness", pairs_value(one.hotness)},
         {"ranges", one.ranges},
         {"hottest", std::move(hottest)}});
  }
  try {
    return Json{{"kind", "tessera id statistics"}, {"features", std::move(list)}}.dump(1);
  } catch (const Json::type_error&) {
    throw PlanError(PlanErrorKind::kBadProblem, "plan: the name of a feature is not UTF-8");
  }
}

std::vector<IdStatistics> statistics_from_json(std::string_view text) {
  const Json value = json::parse(text, "the statistics");
  const Place root(value, "");
  root.check_keys({"kind", "features"});
  if (!root.has("kind") || root["kind"].text() != "tessera id statistics") {
    root.refuse("is no file of tessera data stats");
  }
  std::vector<IdStatistics> features;
  const Place list = root["features"];
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Place place = list[i];
    place.check_keys({"name", "rows", "samples", "ids", "ids_per_sample", "empty_share", "distinct",
                      "zipf", "zipf_error", "curve", "hotness", "ranges", "hottest"});
    IdStatistics one;
    one.name = place["name"].text();
    one.rows = place["rows"].whole(1, std::int64_t{1} << 44);
    one.samples = place["samples"].number(0, 1e18);
    one.ids = place["ids"].number(0, 1e18);
    const Place lengths = place["ids_per_sample"];
    lengths.check_keys({"mean", "median", "p99", "most"});
    one.mean = lengths["mean"].number(0, 1e6);
    one.median = lengths["median"].number(0, 1e9);
    one.p99 = lengths["p99"].number(0, 1e9);
    one.most = lengths["most"].number(0, 1e9);
    one.empty_share = place["empty_share"].number(0, 1);
    one.distinct = place["distinct"].number(0, 1e18);
    one.zipf = place["zipf"].number(-1e3, 1e3);
    one.zipf_error = place["zipf_error"].number(0, 1e3);
    const Place curve = place["curve"];
    one.curve = pairs_at(curve);
    for (std::size_t k = 0; k < one.curve.size(); ++k) {
      const auto& [lookups, distinct] = one.curve[k];
      if (lookups < 1 || distinct > lookups) {
        curve[k].refuse("has more distinct ids than lookups");
      }
    }
    one.hotness = pairs_at(place["hotness"]);
    const Place ranges = place["ranges"];
    for (std::size_t k = 0; k < ranges.size(); ++k) {
      one.ranges.push_back(ranges[k].number(0, 1e18));
    }
    const Place hottest = place["hottest"];
    for (std::size_t k = 0; k < hottest.size(); ++k) {
      const Place hot = hottest[k];
      if (hot.size() != 2) hot.refuse("is not [id, lookups]");
      one.hottest.emplace_back(hot[std::size_t{0}].whole(0, std::int64_t{1} << 62),
                               hot[std::size_t{1}].number(0, 1e18));
    }
    features.push_back(std::move(one));
  }
  return features;
}

int apply(const std::vector<IdStatistics>& features, std::vector<Table>& tables) {
  int found = 0;
  for (Table& table : tables) {
    if (table.features.size() != 1) continue;
    for (const IdStatistics& one : features) {
      if (one.name != table.name) continue;
      table.features[0].ids = one.mean;
      table.features[0].distinct = one.curve;
      if (table.rows == one.rows) table.ids_below = ids_below(one);
      ++found;
      break;
    }
  }
  return found;
}

}  // namespace tessera::planner
