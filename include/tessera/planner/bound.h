// tessera/planner/bound.h — how fast no plan can be, with a proof that anyone can repeat.
//
// Give every second of a rank and every byte of it a price. Whatever a plan with a step of T does,
// each table uses one of its options whose shards all fit into T and into a rank's memory, and the
// options' prices together are at most the price of all ranks' T and memory. So if the cheapest
// options cost more than that, no plan reaches T.

#pragma once

#include <string>
#include <vector>

#include "tessera/core/export.h"
#include "tessera/planner/options.h"

namespace tessera::planner {

/// Prices for one kind of rank.
struct Price {
  int num_ranks = 0;
  double capacity = 0;  // bytes of such a rank
  double second = 0;    // of one rank; over all ranks they add up to 1
  double byte = 0;
};

/// Where links and memory are waited for apart: prices that refute plans whose slowest memory takes
/// from `from` to `to` seconds, so that no part asks more than `to` of memory.
struct PhasePrices {
  double from = 0;
  double to = 0;
  double links = 1;  // of a second
  double local = 1;  // of a second
  double byte = 0;
};

/// What the shards of a table earn together at least: by the share of the table that they are, and
/// by the part of it that each is.
struct TablePay {
  std::string table;
  double share = 0;
  double part = 0;
};

struct TablePays {
  std::vector<TablePay> tables;  // the first of every class
  double byte = 0;               // that a shard pays
};

struct Certificate {
  double seconds = 0;         // no plan is faster
  std::vector<Price> prices;  // by kind of rank, in order of their first ranks
  /// If there are any, they are the proof: together they cover 0 to `seconds`.
  std::vector<PhasePrices> phases;
  /// The same: no set of shards that fits into `seconds` earns what a rank would have to.
  TablePays pays;
  /// The table that no allowed cut makes small enough for `seconds`; empty if prices refute it.
  std::string table;
};

/// The option that is cheapest for a class, at the prices of the bound.
enum class Way : std::uint8_t { kParts, kHosts, kUniform };
struct Choice {
  Way way = Way::kParts;
  int count = 1;       // least number of parts, or of hosts
  int uniform = 0;     // which of TableClass::uniform
  double seconds = 0;  // of all shards together
  double bytes = 0;
};

struct Bound {
  Certificate certificate;
  /// For every class: what is cheapest at the prices, and, where memory binds, the leaner of two
  /// that cost the same; the first for all tables would need too much.
  std::vector<Choice> fast;
  std::vector<Choice> lean;
};

/// Throws PlanError(kTooLarge) if a table fits no rank, or all together do not fit.
TESSERA_API Bound lower_bound(const Options& options);

/// All ways of a class whose shards fit into `seconds` and a rank, each with as few parts as that
/// allows. For ranks that are alike; otherwise of the first kind.
TESSERA_API std::vector<Choice> choices_within(const Options& options, const TableClass& one,
                                               double seconds);

/// The price of the cheapest option of class `one` in a plan of `seconds`; infinite if none fits.
TESSERA_API double cheapest(const Options& options, const TableClass& one, double seconds,
                            const std::vector<Price>& prices);

/// Whether `certificate` proves what it says about `problem`. Recomputes everything.
TESSERA_API bool holds(const Certificate& certificate, const Problem& problem);

}  // namespace tessera::planner
