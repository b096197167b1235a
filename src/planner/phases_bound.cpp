// The bound where links and memory are waited for apart.
//
// A plan of T has slowest memory M, for some M from 0 to T, and slowest links of at most T - M. If
// M is below `to`, no part asks more than `to` of memory, so large tables must be cut, and cuts
// cost. Prices for a second of links, a second of memory and a byte refute all M of one piece
// [from, to): the cheapest options whose parts are below `to` cost more than all ranks have to
// give. Pieces that cover 0 to T refute T.

#include "planner/phases_bound.h"

#include <algorithm>
#include <cmath>

#include "planner/places.h"

namespace tessera::planner {
namespace {

constexpr double kPhasesMargin = 1e-9;
constexpr double kMostPrice = 16;  // of memory, beside links at 1
constexpr std::size_t kMostClasses = 256;
constexpr std::size_t kMostPieces = 24;
constexpr int kMostSplits = 24;

// Totals of every way of a class whose parts ask at most `local` of memory, each with as few parts
// as that allows: more parts cost more of everything.
std::vector<Load> ways_within(const Options& options, const TableClass& one, double local) {
  std::vector<Load> ways;
  const double capacity = options.kinds[0].capacity;
  const auto fits = [&](const Load& load) { return load.local <= local && load.bytes <= capacity; };
  const auto least = [&](const std::vector<Load>& loads, int limit) {
    limit = std::min(limit, one.units);
    for (int count = 1; count <= limit; ++count) {
      if (fits(loads[at((one.units + count - 1) / count)])) return count;
    }
    return 0;
  };
  if (one.has_parts) {
    const int most = !one.can_cut      ? 1
                     : one.in_one_host ? std::min(options.ranks_per_host, one.num_ranks_allowed)
                                       : one.num_ranks_allowed;
    if (const int count = least(one.parts[0], most); count > 0) {
      ways.push_back(even_parts(one.parts, one.units, count));
    }
  }
  if (one.has_hosts) {
    const int most = one.can_cut_hosts ? static_cast<int>(one.hosts.size()) : 1;
    if (const int count = least(one.host_parts.full[0], most); count > 0) {
      ways.push_back(even_parts(one.host_parts, one.units, count));
    }
  }
  for (const UniformOption& option : one.uniform) {
    if (fits(option.parts.full[0][1])) ways.push_back(even_parts(option.parts, 1, 1));
  }
  return ways;
}

class Piece {
 public:
  Piece(const Options& options, double from, double to)
      : options_(options), from_(from), to_(to), world_(options.num_ranks()) {
    memory_ = options.kinds[0].capacity * world_;
    for (const TableClass& one : options.classes) {
      ways_.push_back(ways_within(options, one, to));
      is_empty_ = is_empty_ || ways_.back().empty();
    }
  }

  /// No plan whose memory is in the piece is faster, by these prices beside 1 for links.
  double seconds(double local, double byte) const {
    if (is_empty_) return kNoLimit;
    double sum = 0;
    double lost = 0;  // by rounding
    for (std::size_t c = 0; c < ways_.size(); ++c) {
      double best = kNoLimit;
      for (const Load& way : ways_[c]) {
        best = std::min(best, way.links + local * way.local + byte * way.bytes);
      }
      const double value = best * static_cast<double>(options_.classes[c].tables.size()) - lost;
      const double next = sum + value;
      lost = (next - sum) - value;
      sum = next;
    }
    if (byte > 0) sum -= byte * memory_;
    return sum / world_ - (local - 1) * (local > 1 ? to_ : from_);
  }

  /// The prices that refute most.
  PhasePrices best(double& found) const {
    PhasePrices prices{from_, to_, 1, 1, 0};
    if (is_empty_) {
      found = kNoLimit;
      return prices;
    }
    const auto byte_for = [&](double local) {
      if (memory_ == kNoLimit || !(memory_ > 0)) return 0.0;
      double scale = seconds(local, 0) * world_ / memory_;
      if (!(seconds(local, 1e-6 * scale) > seconds(local, 0))) return 0.0;
      return peak(0, 8 * scale, [&](double byte) { return seconds(local, byte); });
    };
    prices.local =
        peak(0, kMostPrice, [&](double local) { return seconds(local, byte_for(local)); });
    prices.byte = byte_for(prices.local);
    found = seconds(prices.local, prices.byte);
    if (const double plain = seconds(1, byte_for(1)); plain >= found) {
      prices.local = 1;
      prices.byte = byte_for(1);
      found = plain;
    }
    return prices;
  }

 private:
  // Where a concave function is largest, nearly; any place is a proof.
  template <class Function>
  static double peak(double low, double high, Function value) {
    for (int step = 0; step < 40; ++step) {
      const double left = low + (high - low) * 0.382;
      const double right = low + (high - low) * 0.618;
      (value(left) < value(right) ? low : high) = value(left) < value(right) ? left : right;
    }
    return (low + high) / 2;
  }

  const Options& options_;
  double from_;
  double to_;
  double world_;
  double memory_ = 0;
  bool is_empty_ = false;
  std::vector<std::vector<Load>> ways_;
};

// Seconds in memory below which some class has to be cut into more parts, the dearest classes
// first.
std::vector<double> borders(const Options& options, double mean) {
  std::vector<std::pair<double, double>> found;  // (weight, border)
  for (const TableClass& one : options.classes) {
    const auto add = [&](const Load& load) {
      if (load.local > mean / 2 && load.local < 2 * mean) {
        found.emplace_back(load.local * static_cast<double>(one.tables.size()), load.local);
      }
    };
    for (int count = 1; count <= std::min(4, one.units); ++count) {
      const std::size_t widest = at((one.units + count - 1) / count);
      if (one.has_parts) add(one.parts[0][widest]);
      if (one.has_hosts) add(one.host_parts.full[0][widest]);
    }
    for (const UniformOption& option : one.uniform) add(option.parts.full[0][1]);
  }
  std::sort(found.rbegin(), found.rend());
  if (found.size() > kMostPieces) found.resize(kMostPieces);
  std::vector<double> places{0};
  for (const auto& [weight, border] : found) places.push_back(border * (1 - 1e-7));
  for (const double share : {0.8, 0.9, 1.0, 1.05, 1.1, 1.2, 1.4}) places.push_back(share * mean);
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
  places.push_back(kNoLimit);
  return places;
}

}  // namespace

void sharpen_for_phases(const Options& options, Bound& bound) {
  if (options.kinds.size() != 1 || options.classes.size() > kMostClasses) return;
  double local = 0;
  for (const TableClass& one : options.classes) {
    double least = kNoLimit;
    for (const Load& way : ways_within(options, one, kNoLimit)) least = std::min(least, way.local);
    local += least * static_cast<double>(one.tables.size());
  }
  const double mean = local / options.num_ranks();
  if (!(mean > 0) || mean == kNoLimit) return;
  struct Refuted {
    PhasePrices prices;
    double seconds;  // a plan whose memory alone takes longer is slower anyway
  };
  const auto refute = [&](double from, double to) {
    double seconds = 0;
    const PhasePrices prices = Piece(options, from, to).best(seconds);
    return Refuted{prices, std::max(seconds, from)};
  };
  std::vector<Refuted> found;
  double refuted = kNoLimit;
  const std::vector<double> places = borders(options, mean);
  for (std::size_t i = 0; i + 1 < places.size(); ++i) {
    found.push_back(refute(places[i], std::min(places[i + 1], 1e12)));
    refuted = std::min(refuted, found.back().seconds);
  }
  // The piece that refutes least decides: halves of it refute more.
  for (int split = 0; split < kMostSplits; ++split) {
    const auto least =
        std::min_element(found.begin(), found.end(),
                         [](const Refuted& a, const Refuted& b) { return a.seconds < b.seconds; });
    const double from = least->prices.from;
    const double to = std::min(least->prices.to, 2 * least->seconds);
    const double middle = from + (to - from) / 2;
    if (!(middle > from && middle < to) || to - from < 1e-4 * mean) break;
    const double end = least->prices.to;
    *least = refute(middle, end);
    found.insert(found.begin() + (least - found.begin()), refute(from, middle));
    refuted = kNoLimit;
    for (const Refuted& one : found) refuted = std::min(refuted, one.seconds);
  }
  std::vector<PhasePrices> pieces;
  for (const Refuted& one : found) {
    if (one.prices.from < refuted) pieces.push_back(one.prices);
  }
  refuted *= 1 - kPhasesMargin;
  if (!(refuted > bound.certificate.seconds) || refuted == kNoLimit) return;
  bound.certificate.seconds = refuted;
  bound.certificate.table.clear();
  bound.certificate.phases = std::move(pieces);
}

bool phases_hold(const Options& options, const Certificate& certificate) {
  if (options.kinds.size() != 1) return false;
  double reached = 0;
  for (const PhasePrices& piece : certificate.phases) {
    const bool is_right = piece.from <= reached && piece.to > piece.from && piece.links == 1 &&
                          piece.local >= 0 && piece.byte >= 0 && piece.local < kNoLimit &&
                          piece.byte < kNoLimit;
    if (!is_right) return false;
    if (piece.from < certificate.seconds &&
        !(Piece(options, piece.from, piece.to).seconds(piece.local, piece.byte) >
          certificate.seconds)) {
      return false;
    }
    reached = std::max(reached, piece.to);
  }
  return reached >= certificate.seconds;
}

}  // namespace tessera::planner
