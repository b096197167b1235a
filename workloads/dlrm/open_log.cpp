#include "dlrm/open_log.h"

#include <cerrno>
#include <cstring>
#include <fstream>

#include "dlrm/click_file.h"
#include "dlrm/criteo.h"

namespace tessera::workloads::dlrm {
namespace {

constexpr std::string_view kBinaryBegin = "TSRCLICK";

bool is_binary(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw DataError(path + ": cannot be read: " + std::strerror(errno) + ".");
  std::string begin(kBinaryBegin.size(), '\0');
  file.read(begin.data(), static_cast<std::streamsize>(begin.size()));
  return begin == kBinaryBegin;
}

std::string notes_of(const std::string& path, const CriteoReport& report) {
  if (report.num_bad == 0) return "";
  std::string notes = "data     " + std::to_string(report.num_bad) + " bad lines of " +
                      std::to_string(report.num_lines) + " in " + path + " are left out\n";
  for (const CriteoReport::BadLine& bad : report.first_bad) {
    notes += "         " + place_of(bad) + ": " + bad.reason + "\n";
  }
  return notes;
}

// One or more. Throws DataError for a click log among several.
std::vector<std::string> files_of(const std::string& names, const LogOptions& options) {
  if (!options.files) return {names};
  std::vector<std::string> files = options.files(names);
  if (files.empty()) throw DataError(names + ": names no file.");
  for (const std::string& file : files) {
    if (files.size() > 1 && is_binary(file)) {
      throw DataError(file + ": is a click log, which is read alone; only texts may be several.");
    }
  }
  return files;
}

}  // namespace

OpenedLog open_log(const std::string& names, const LogOptions& options) {
  OpenedLog opened;
  const std::vector<std::string> files = files_of(names, options);
  const std::string& name = files[0];
  if (name == "synthetic") {
    SyntheticOptions synthetic;
    synthetic.seed = options.seed;
    synthetic.schema.features =
        equal_features(options.num_tables, options.num_rows, options.bag_size);
    opened.synthetic = std::make_shared<const SyntheticLog>(synthetic);
    opened.log = opened.synthetic;
  } else if (is_binary(name)) {
    opened.log = std::make_shared<const ClickFile>(name);
    if (opened.log->num_samples() == 0) throw DataError(name + ": there is no sample in it.");
  } else {
    CriteoOptions criteo;
    criteo.features = equal_features(kCriteoFeatures, options.num_rows);
    criteo.unpack = options.unpack;
    const auto text = std::make_shared<const CriteoLog>(files, criteo);
    check_has_samples(files, text->report());
    opened.notes = notes_of(names, text->report());
    opened.log = text;
  }
  return opened;
}

}  // namespace tessera::workloads::dlrm
