// report/run_folder.h — the folder a training writes: config.toml, metrics.jsonl, trace.json and,
// at the end, report.html.

#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>

#include <nlohmann/json.hpp>

namespace tessera::workloads::report {

/// A run folder that cannot be made, read or written. The text names the file and the cause.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr const char* kConfigFile = "config.toml";
inline constexpr const char* kMetricsFile = "metrics.jsonl";
inline constexpr const char* kTraceFile = "trace.json";
inline constexpr const char* kReportFile = "report.html";

/// Makes `root`/2026-11-15-1, or -2, … : the first name of today that is free. Safe against other
/// jobs that do the same. Returns its path. Throws Error.
std::string make_run_folder(const std::string& root);

/// Reads a whole file. Throws Error.
std::string read_text(const std::string& path);
/// Writes a file, whole or not at all. Throws Error.
void write_text(const std::string& path, const std::string& text);

/// Appends objects to a file, one per line, each on the disk's side when `add` returns: what was
/// logged before a process died can be read.
class MetricsFile {
 public:
  /// Opens `path`; `keep_until` drops the lines of later steps first, for a job that resumes.
  explicit MetricsFile(const std::string& path, std::int64_t keep_until = -1);
  void add(const nlohmann::ordered_json& line);

 private:
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  std::string path_;
};

}  // namespace tessera::workloads::report
