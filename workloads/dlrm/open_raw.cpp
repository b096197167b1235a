#include "dlrm/open_raw.h"

#include <algorithm>
#include <fstream>
#include <memory>

#include "data/raw_log.h"
#include "dlrm/criteo.h"

namespace tessera::workloads::dlrm {
namespace {

// Beyond the hashes of Criteo's texts, so that these are taken as they are.
constexpr std::int64_t kAnyRow = std::int64_t{1} << 40;

/// A file of ours, or a line with as many tabs as Criteo's have.
bool is_known_log(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string line(8, '\0');
  file.read(line.data(), static_cast<std::streamsize>(line.size()));
  if (line == "TSRCLICK") return true;
  file.clear();
  file.seekg(0);
  std::getline(file, line);
  return std::count(line.begin(), line.end(), '\t') == kCriteoDense + kCriteoFeatures;
}

}  // namespace

std::function<void(std::string_view, std::int64_t)> teller_of(
    const std::shared_ptr<TextCheck>& texts) {
  if (texts == nullptr) return nullptr;
  return [texts](std::string_view text, std::int64_t id) { texts->see(text, id); };
}

OpenedLog open_raw(const std::string& name, const std::string& schema, LogOptions options,
                   const std::shared_ptr<TextCheck>& texts) {
  if (name == "synthetic") return open_log(name, options);
  if (schema.empty() && is_known_log(name)) {
    options.num_rows = kAnyRow;
    return open_log(name, options);
  }
  OpenedLog opened;
  const auto log = std::make_shared<const data::RawLog>(
      data::files_of(name), data::schema_or_guess(schema, name), teller_of(texts));
  opened.notes = data::notes_of(name, log->report());
  opened.log = log;
  return opened;
}

}  // namespace tessera::workloads::dlrm
