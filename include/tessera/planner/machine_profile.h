// tessera/planner/machine_profile.h — what a machine was measured to do, for the planner.
//
// `tessera doctor --profile` measures and writes it; plans and trainings read it. A curve is a list
// of points that was measured; the planner's costs add up over shards, so a curve enters as the
// straight line that fits it best.

#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/core/export.h"
#include "tessera/planner/cost.h"
#include "tessera/planner/problem.h"

namespace tessera::planner {

/// (size, seconds), sizes rising.
using Curve = std::vector<std::pair<double, double>>;

/// seconds = fixed + size * each, neither negative, with the least square of relative errors.
struct Line {
  double fixed = 0;
  double each = 0;
};
TESSERA_API Line fit(const Curve& curve);

/// Makes a measured curve rise: what was faster although it was larger is taken to be as slow.
TESSERA_API Curve rising(Curve curve);

/// Factors by which a run was slower than its prediction, by part.
struct Calibration {
  std::string run;  // empty: none
  double links = 1;
  double lookup = 1;
  double step = 1;
  double dense = 1;

  bool operator==(const Calibration&) const = default;
};

/// The factors, and their names in JSON.
struct FactorName {
  const char* key;
  double Calibration::* factor;
};
inline constexpr FactorName kCalibrationFactors[] = {{"links", &Calibration::links},
                                                     {"lookup", &Calibration::lookup},
                                                     {"step", &Calibration::step},
                                                     {"dense", &Calibration::dense}};

/// A pass over `tables` alike, all cut in one way, as a training does it on this machine: ids to
/// their rows, rows to their samples, gradients back and the step of the rows.
struct Pass {
  Cut cut = Cut::kTableWise;
  std::int64_t batch = 0;  // samples of a rank
  int tables = 0;
  std::int64_t rows = 0;
  std::int64_t dim = 0;
  double ids = 0;            // of a sample and table
  double distinct = 0;       // ids of a table, of all ranks
  double distinct_here = 0;  // the same of one rank
  double input = 0;          // seconds
  double forward = 0;
  double backward = 0;
};

struct MachineProfile {
  std::string machine;  // processor, or GPU
  std::string version;  // of the library
  std::string engine;
  int num_ranks = 0;         // that were busy at once on a host
  int threads_per_rank = 0;  // of each
  Curve rows;                // bytes of a row; seconds of one that is looked up
  Curve steps;               // bytes that one id moves; seconds of it in the fused step
  Curve parts;               // tables; seconds of a lookup of next to nothing in all of them
  Curve host;                // bytes that leave a rank; seconds of an all-to-all inside a host
  Curve network;             // the same between hosts; empty: not measured
  Curve all_reduce;          // bytes; seconds of one inside a host
  Curve network_all_reduce;  // the same of all hosts that were measured together
  Curve dense;               // operations of a layer, forward and backward; seconds
  std::vector<Pass> passes;
  double spread = 0;  // the largest of all points: (slowest - fastest) / median
  int left_out = 0;   // points and passes for which there was no time
  Calibration calibration;
};

/// Speeds that make the costs of passes what was measured, with the least squares of relative
/// errors, none negative; and what a pass takes whatever its load.
struct PassFit {
  Speeds speeds;
  double input = 0;
  double forward = 0;
  double backward = 0;
};
/// Speeds that the passes do not tell are those of `assumed`. Without passes: `assumed`.
TESSERA_API PassFit fit(const std::vector<Pass>& passes, int num_ranks, const Speeds& assumed);

/// Throws PlanError(kBadProblem) with the place.
TESSERA_API MachineProfile profile_from_json(std::string_view text);
TESSERA_API std::string to_json(const MachineProfile& profile);

/// Speeds of one rank. What was not measured is as assumed: see `assumed`.
TESSERA_API Speeds speeds_of(const MachineProfile& profile);

/// What of the speeds was not measured, in words: of "memory", "links in a host" and "links between
/// hosts".
TESSERA_API std::vector<std::string> assumed(const MachineProfile& profile);

/// The processor of this machine, as a profile names it.
TESSERA_API std::string processor_name();

/// Where a profile is used. An engine that is not known is empty, a number of ranks 0.
struct Here {
  std::string machine = processor_name();
  std::string engine;
  int num_ranks = 0;  // of a host
};

/// How the place where a profile was measured differs from where it is used.
struct Difference {
  bool is_other_machine = false;
  std::string words;  // "on A (here B), with 2 ranks (here 4)"; empty: in nothing
};
/// Compares machine, ranks, engine, and the version of the library.
TESSERA_API Difference difference(const MachineProfile& profile, const Here& here);

/// Where a profile is kept: $TESSERA_PROFILE, else tessera/machine.json in the user's cache folder.
/// Empty if there is no such folder.
TESSERA_API std::string profile_path();

/// Whether $TESSERA_PROFILE names it.
TESSERA_API bool is_profile_named();

/// What one step of a training takes, by part.
struct StepTime {
  double links = 0;     // ids and rows on their way, forward
  double lookup = 0;    // rows
  double dense = 0;     // forward of the dense layers
  double backward = 0;  // of all, with the steps of the rows
  // Of backward, where it is known: gradients of rows on their way, and steps of the rows.
  double gradients = 0;
  double step = 0;
  double other = 0;  // reading the samples, and the step of the dense layers

  double total() const noexcept { return links + lookup + dense + backward + other; }
};

/// What the dense layers ask of every rank.
struct DenseLoad {
  double operations = 0;  // of a step, forward and backward
  double bytes = 0;       // of gradients
  int layers = 1;         // each has what a layer takes whatever its size
  // Seconds that were measured beforehand; they take the place of the operations.
  double forward = 0;
  double backward = 0;
  double other = 0;
};

/// The step of the rank that has most to do by `costs`, whose speeds are those of `profile`.
TESSERA_API StepTime predict(const MachineProfile& profile, const std::vector<ShardCost>& costs,
                             const DenseLoad& dense);

/// Factors that make what a profile would have predicted into what was `measured`, each from half
/// to twice. `with` is the calibration that the profile had when it `predicted`.
TESSERA_API Calibration calibrate(const std::string& run, const StepTime& predicted,
                                  const StepTime& measured, const Calibration& with = {});

}  // namespace tessera::planner
