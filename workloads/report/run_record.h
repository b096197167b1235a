// report/run_record.h — what metrics.jsonl and trace.json say about a run.
//
// metrics.jsonl holds one JSON object per line, told apart by "kind":
//
//   run        name, workload, ranks, unit, started, planned_steps, command, data [{path, bytes}],
//              auc_ceiling, versions {}, machine {}
//   resume     step, started, planned_steps, command
//   growth     step, ids, tables [{name, ids, admitted, refused, evicted, hit_rate, bytes}]
//   table      name, rows, columns, bytes, sharding, shards [{rank, row, rows, column, columns,
//              bytes, traffic: bytes that a step reads of it}]
//   plan       sharding, seconds, bound, speeds, ranks [{part: seconds, bytes}], predicted {part:
//              seconds, total} if the machine was measured, calibration {part: factor} of the
//              profile that it was predicted with
//   step       step, loss, seconds, samples_per_second, learning_rate, exposed_comm_seconds
//   eval       step, log_loss, auc, normalized_entropy, calibration, samples; or other figures of
//              the workload by their names
//   calibration  step; of parts of equally many samples, by prediction: predicted [], observed []
//   text       step, text: what a language model wrote
//   breakdown  rank, steps, seconds, phases {name: {seconds, waited}}; seconds of all steps; of
//              each of the last steps: exposed_comm_us [], data_us []
//   end        steps, seconds, samples, peak_memory_bytes [per rank], peak_device_bytes [], status,
//              best_step, resume

#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::workloads::report {

inline constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();

struct StepRow {
  std::int64_t step = 0;
  double loss = kMissing;
  double seconds = kMissing;
  double samples_per_second = kMissing;
  double learning_rate = kMissing;
  double exposed_comm_seconds = kMissing;
};

struct EvalRow {
  std::int64_t step = 0;
  double log_loss = kMissing;
  double auc = kMissing;
  double normalized_entropy = kMissing;
  double calibration = kMissing;
  std::int64_t samples = 0;
  std::vector<std::pair<std::string, double>> others;  // figures of other names, in their order
};

struct Shard {
  int rank = 0;
  std::int64_t row = 0;
  std::int64_t rows = 0;
  std::int64_t column = 0;
  std::int64_t columns = 0;
  double bytes = 0;
  double traffic = kMissing;  // bytes that a step reads of it
};

struct Table {
  std::string name;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  double bytes = 0;
  std::string sharding;
  std::vector<Shard> shards;
};

struct PhaseTime {
  double seconds = 0;  // the phase itself, without phases inside it; waiting included
  double waited = 0;   // of these, waiting for communication
};

struct Breakdown {
  int rank = 0;
  std::int64_t steps = 0;
  double seconds = 0;
  std::map<std::string, PhaseTime> phases;
};

/// Predicted against observed: means of parts of equally many samples, by prediction.
struct CalibrationRow {
  std::int64_t step = 0;
  std::vector<double> predicted;
  std::vector<double> observed;
};

struct DataFile {
  std::string path;
  double bytes = 0;
};

/// What the planner thinks of where the tables lie.
struct PlanRow {
  std::string sharding;
  std::string speeds;                                // "measured" or "assumed"
  double seconds = 0;                                // of the slowest rank's tables
  double bound = 0;                                  // no plan is faster
  std::vector<std::map<std::string, double>> ranks;  // seconds by part, and "bytes"
  std::map<std::string, double> predicted;           // seconds of a step by part; empty: not known
  std::map<std::string, double> calibration;         // of what predicted; empty: not told
};

/// One piece of a rank's time, from trace.json.
struct TraceSpan {
  int rank = 0;
  int thread = 0;
  std::string phase;
  std::string name;
  std::int64_t step = 0;
  bool is_wait = false;
  double begin = 0;  // microseconds
  double duration = 0;
};

/// How tables that grow stood at a step.
struct GrowthRow {
  struct Table {
    std::string name;
    std::int64_t ids = 0;
    std::int64_t admitted = 0;  // since the process began, as all below
    std::int64_t refused = 0;
    std::int64_t evicted = 0;
    double hit_rate = 0;
    double bytes = 0;
  };
  std::int64_t step = 0;
  double ids = 0;  // of all tables
  std::vector<Table> tables;
};

struct RunRecord {
  std::string name;
  std::string workload;
  std::string unit = "samples";  // what is counted per second
  std::string started;
  int num_ranks = 1;
  std::int64_t planned_steps = 0;  // 0: not known
  std::string command;             // as it was typed
  std::vector<DataFile> data;
  std::vector<std::int64_t> resumed;  // steps that were done when it went on
  std::optional<double> auc_ceiling;
  std::vector<std::pair<std::string, std::string>> facts;  // versions and machine
  std::vector<Table> tables;
  std::optional<PlanRow> plan;
  std::vector<StepRow> steps;
  std::vector<EvalRow> evals;
  std::optional<CalibrationRow> calibration;  // the last one
  std::vector<GrowthRow> growth;
  std::vector<std::pair<std::int64_t, std::string>> texts;  // written at a step
  std::vector<Breakdown> breakdowns;                        // by rank
  std::vector<TraceSpan> spans;                             // by begin
  std::string config;
  std::int64_t total_steps = 0;
  double total_seconds = 0;
  double total_samples = 0;
  std::vector<double> peak_memory_bytes;  // per rank
  std::vector<double> peak_device_bytes;  // per rank; empty without a GPU
  bool has_ended = false;
  std::string status;          // finished, stopped, stopped early, diverged
  std::int64_t best_step = 0;  // of the evaluation that was the best; 0: none
  std::string resume;          // the command that goes on
};

/// Reads a run folder. metrics.jsonl must be there; the others may be missing. Half a line at the
/// end of metrics.jsonl, as a killed process leaves it, is ignored. Throws Error naming file, line
/// and cause.
RunRecord read_run(const std::string& folder);

/// Seconds of a step as the plan's prediction has them: "links", "lookup", "dense", "backward";
/// means over the ranks. Empty if nothing was measured.
std::map<std::string, double> measured_parts(const RunRecord& run);

}  // namespace tessera::workloads::report
