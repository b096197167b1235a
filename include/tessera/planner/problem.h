// tessera/planner/problem.h — what a planner is asked: tables, a load, ranks, and rules.
//
// Nothing of the planner communicates or knows a tensor. Costs are of a model (cost.h); the proof
// that comes with a plan is about that model.

#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/core/export.h"

namespace tessera::planner {

/// How a table is cut; the names are those of sharding::ShardingType.
enum class Cut : std::uint8_t {
  kDataParallel,
  kTableWise,
  kColumnWise,
  kRowWise,
  kTableRowWise,
  kTableColumnWise,
  kGrid,
};
enum class Kernel : std::uint8_t { kDense, kFused };

/// "data_parallel", "table_wise", …; "dense", "fused".
TESSERA_API std::string_view name_of(Cut cut) noexcept;
TESSERA_API std::string_view name_of(Kernel kernel) noexcept;
/// Throw PlanError(kBadProblem) for other names.
TESSERA_API Cut cut_of(std::string_view name);
TESSERA_API Kernel kernel_of(std::string_view name);

/// What one feature asks of its table.
struct Feature {
  double ids = 1;  // per sample, in the mean
  bool is_weighted = false;
  /// Distinct ids among so many lookups, measured: (lookups, distinct), both rising. Empty: ids
  /// are taken to be spread evenly over the rows.
  std::vector<std::pair<double, double>> distinct;

  bool operator==(const Feature&) const = default;
};

struct Table {
  std::string name;
  std::int64_t rows = 0;
  std::int64_t dim = 0;
  double element_bytes = 4;
  bool is_pooled = true;  // false: a row per id
  std::vector<Feature> features = {Feature{}};
  double state_bytes_per_row = 4;  // of the optimizer; row-wise Adagrad
  double state_bytes_per_element = 0;
  /// Ranks that hold its columns sum the norms of its rows in every step.
  bool has_exact_norms = false;
  /// (row, share of the ids that are of rows below it), measured, both rising, the last one (rows,
  /// 1); straight lines between them and from (0, 0). Empty: ids are spread evenly over the rows.
  std::vector<std::pair<double, double>> ids_below;
};

/// What is allowed for one table. Empty lists allow everything.
struct TableRules {
  std::vector<Cut> cuts;
  std::vector<Kernel> kernels;
  std::int64_t min_columns = 0;  // of a part; 0: four
  std::vector<int> ranks;        // a device group, or the one rank a table is pinned to

  bool operator==(const TableRules&) const = default;
};

/// Bytes per second of one rank while the others do the same, and what a measured machine asks
/// beside the bytes (machine_profile.h).
struct Speeds {
  double memory = 51e9;     // a socket of DDR4
  double host = 25e9;       // to ranks of the same host
  double network = 12.5e9;  // to ranks of other hosts
  double step = 0;          // of the fused step; 0: as `memory`
  double row_seconds = 0;   // of a row that is looked up, whatever its width
  double id_seconds = 0;    // of an id in the fused step: sorting, and finding its gradient
  double part_seconds = 0;  // of a shard, in every step
  double sent_seconds = 0;  // of an id on its way: packed, and unpacked
  double cut_seconds = 0;   // the same beside it where rows are cut: finding its rank
  double bag_seconds = 0;   // of a bag of a shard: its length, and the place of its row
  // Of a row whose gradients are summed before its step, since ranks exchange them, and of a byte.
  double merge_seconds = 0;
  double merge_byte_seconds = 0;

  bool operator==(const Speeds&) const = default;
};

/// Those of the speeds that are seconds, and their names in JSON.
struct SecondsName {
  const char* key;
  double Speeds::* seconds;
};
inline constexpr SecondsName kSpeedSeconds[] = {
    {"row_seconds", &Speeds::row_seconds},     {"id_seconds", &Speeds::id_seconds},
    {"part_seconds", &Speeds::part_seconds},   {"sent_seconds", &Speeds::sent_seconds},
    {"cut_seconds", &Speeds::cut_seconds},     {"bag_seconds", &Speeds::bag_seconds},
    {"merge_seconds", &Speeds::merge_seconds}, {"merge_byte_seconds", &Speeds::merge_byte_seconds},
};

inline constexpr double kNoLimit = std::numeric_limits<double>::infinity();

struct Rank {
  double memory = kNoLimit;  // bytes, before the reservation
  Speeds speeds;

  bool operator==(const Rank&) const = default;
};

enum class Objective : std::uint8_t {
  kSum,     // the slowest rank's whole step
  kPhases,  // links and memory are waited for separately
};

struct Problem {
  std::vector<Table> tables;
  std::map<std::string, TableRules> rules;
  /// Tables of one list never meet on a rank; so they are neither row_wise nor data_parallel.
  std::vector<std::vector<std::string>> apart;
  /// Tables of one list lie whole on one rank, the same for all.
  std::vector<std::vector<std::string>> together;
  std::int64_t batch = 512;  // samples per rank and step
  std::vector<Rank> ranks = {Rank{}};
  int ranks_per_host = 1;
  double reserved_percent = 15;  // of a rank's memory: dense layers, the program
  double reserved_bytes = 0;     // beside that
  Objective objective = Objective::kSum;
  int tries = 64;  // of the search: low 8, normal 64, high 4096

  int num_ranks() const noexcept { return static_cast<int>(ranks.size()); }
  int num_hosts() const noexcept { return num_ranks() / ranks_per_host; }
};

/// Throws PlanError(kBadProblem) that names the table or rank: no tables, a name twice or empty,
/// numbers out of range, hosts that do not divide the ranks, rules or lists of unknown tables; and
/// kRules for lists that contradict each other, or the rules.
TESSERA_API void check(const Problem& problem);

/// Problems as JSON; docs/planner.md lists the keys. A key twice, an unknown key, and a number out
/// of range throw PlanError(kBadProblem) with the place.
TESSERA_API Problem problem_from_json(std::string_view text);
TESSERA_API std::string to_json(const Problem& problem);

}  // namespace tessera::planner
