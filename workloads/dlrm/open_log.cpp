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
    notes += "         line " + std::to_string(bad.line) + ": " + bad.reason + "\n";
  }
  return notes;
}

}  // namespace

OpenedLog open_log(const std::string& name, const LogOptions& options) {
  OpenedLog opened;
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
    const auto text = std::make_shared<const CriteoLog>(name, criteo);
    check_has_samples({name}, text->report());
    opened.notes = notes_of(name, text->report());
    opened.log = text;
  }
  return opened;
}

}  // namespace tessera::workloads::dlrm
