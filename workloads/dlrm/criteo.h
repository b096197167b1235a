// dlrm/criteo.h — Criteo's tab-separated click logs. No LibTorch.
//
// A line: label (0 or 1), 13 integers, 26 hexadecimal strings of at most 8 digits, separated by
// tabs; numbers and strings may be missing. Dense x becomes log(1 + x); x below 0 counts as 0, as
// does a missing one. A string h becomes row h mod num_rows; a missing one becomes row 0 (a bag of
// one id, as in the reference pipelines).

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dlrm/click_log.h"
#include "dlrm/synthetic.h"
#include "dlrm/text_blocks.h"

namespace tessera::workloads::dlrm {

inline constexpr std::int64_t kCriteoDense = 13;
inline constexpr std::int64_t kCriteoFeatures = 26;

struct CriteoOptions {
  /// 26 features with bags of 1; names and rows as wanted.
  std::vector<Feature> features = equal_features(kCriteoFeatures, 100000);
  /// Throw for the first bad line instead of leaving it out.
  bool strict = false;
  /// Threads that parse; 0 for one per core that affinity and control group leave.
  int num_threads = 0;
  /// How many bad lines are remembered by number and reason.
  std::int64_t num_named = 5;
  /// Reads a file whose bytes are not the text itself, or "-", standard input; none for one whose
  /// bytes are. Without it, packed files are refused.
  std::function<ReadText(const std::string& path)> unpack = nullptr;
};

/// What was read and what was left out.
struct CriteoReport {
  struct BadLine {
    std::int64_t line = 0;  // from 1
    std::string reason;
    std::string file = {};  // where several were read
  };
  std::int64_t num_lines = 0;
  std::int64_t num_samples = 0;
  std::int64_t num_bad = 0;
  std::int64_t num_bytes = 0;
  std::vector<BadLine> first_bad;
};

/// Parses a file or a pipe by several threads, a few blocks of 4 MiB at a time, and hands over
/// blocks of samples in the order of the lines, from the calling thread. The blocks are the same
/// for any number of threads. Throws DataError if the text cannot be read or is something else than
/// text and, if strict, for the first bad line.
CriteoReport read_criteo(const std::string& path, const CriteoOptions& options,
                         const std::function<void(SampleBlock&)>& take);

/// One file after the other.
CriteoReport read_criteo(const std::vector<std::string>& paths, const CriteoOptions& options,
                         const std::function<void(SampleBlock&)>& take);

/// "line 3", or "day_1: line 3" where several files were read.
std::string place_of(const CriteoReport::BadLine& bad);

/// Throws DataError, naming the files and their first bad line, if no sample was read.
void check_has_samples(const std::vector<std::string>& paths, const CriteoReport& report);

/// Parses one line without its end. Returns an empty text and fills `label`, `dense` (13) and `ids`
/// (26), or returns what is wrong with it.
std::string parse_criteo_line(std::string_view line, const std::vector<Feature>& features,
                              float& label, float* dense, std::int64_t* ids);

/// Writes samples [first, first + count) of a synthetic log as lines, so that reading them gives
/// the same samples. The schema must be Criteo's (13 numbers, 26 bags of 1, tables below 2^32
/// rows).
void append_criteo_lines(const SyntheticLog& log, std::int64_t first, std::int64_t count,
                         std::string& text);

/// Files read whole into memory (about 270 bytes per sample). Larger ones: `tessera data convert`.
class CriteoLog : public ClickLog {
 public:
  explicit CriteoLog(const std::string& path, const CriteoOptions& options = {});
  explicit CriteoLog(const std::vector<std::string>& paths, const CriteoOptions& options = {});
  ~CriteoLog() override;

  const ClickSchema& schema() const noexcept override;
  std::int64_t num_samples() const noexcept override;
  void read(std::int64_t first, std::int64_t count, SampleBlock& block) const override;
  const CriteoReport& report() const noexcept { return report_; }

 private:
  ClickSchema schema_;
  CriteoReport report_;
  std::vector<SampleBlock> blocks_;
  std::vector<std::int64_t> first_samples_;
};

}  // namespace tessera::workloads::dlrm
