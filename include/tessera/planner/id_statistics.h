// tessera/planner/id_statistics.h — what a log says about the ids of its features.
//
// `tessera data stats` counts; plans and trainings read the file.

#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/core/export.h"
#include "tessera/planner/problem.h"

namespace tessera::planner {

/// Of one feature.
struct IdStatistics {
  std::string name;
  std::int64_t rows = 0;  // of its table
  double samples = 0;
  double ids = 0;
  double mean = 0;  // ids per sample, as are the next
  double median = 0;
  double p99 = 0;
  double most = 0;
  double empty_share = 0;  // of samples without an id
  double distinct = 0;     // ids, exact up to a million, then to about 1 %
  double zipf = 0;         // exponent of the law that fits the counts of the hottest ids
  double zipf_error = 0;   // its standard error
  /// (lookups, distinct ids among the first so many): powers of two from 256 on, half-way between
  /// them, and the end.
  std::vector<std::pair<double, double>> curve;
  /// Share of the lookups that the hottest 1, 2, 4, … ids have.
  std::vector<std::pair<double, double>> hotness;
  std::vector<double> ranges;  // lookups by range: the rows in 1024 equal parts, or one each
  std::vector<std::pair<std::int64_t, double>> hottest;  // (id, lookups), at most 1,024
};

/// Counts the ids of one feature in one pass, with at most 64 MB.
class TESSERA_API IdCounter {
 public:
  IdCounter(std::string name, std::int64_t rows);
  ~IdCounter();
  IdCounter(IdCounter&&) noexcept;
  IdCounter& operator=(IdCounter&&) noexcept;

  /// One sample. Ids are in [0, rows).
  void add(const std::int64_t* ids, std::int64_t count);
  IdStatistics finish() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// {"kind": "tessera id statistics", "features": […]}; docs/planner.md lists the keys.
TESSERA_API std::string to_json(const std::vector<IdStatistics>& features);
/// Throws PlanError(kBadProblem) with the place.
TESSERA_API std::vector<IdStatistics> statistics_from_json(std::string_view text);

/// Gives tables with one feature the ids and the curve of the feature of their name. Returns how
/// many were found.
TESSERA_API int apply(const std::vector<IdStatistics>& features, std::vector<Table>& tables);

}  // namespace tessera::planner
