#include "dlrm/open_raw.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <system_error>

#include "data/content.h"
#include "data/input.h"
#include "data/raw_log.h"
#include "dlrm/criteo.h"

namespace tessera::workloads::dlrm {
namespace {

// Beyond the hashes of Criteo's texts, so that these are taken as they are.
constexpr std::int64_t kAnyRow = std::int64_t{1} << 40;

// Packed or not.
std::string first_line(const std::string& path) {
  constexpr std::size_t kMost = 4096;
  data::Input input(path);
  std::string text;
  char part[kMost];
  while (text.size() < kMost && text.find('\n') == std::string::npos) {
    const std::size_t more = input.read(part, sizeof(part));
    if (more == 0) break;
    text.append(part, more);
  }
  return text.substr(0, text.find('\n'));
}

/// A file of ours, or a text, packed or not, whose first line has as many tabs as Criteo's have.
bool is_known_log(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return false;  // a pipe, or a pattern
  const data::FileKind kind = data::content_of(data::front_of(path)).kind;
  if (kind == data::FileKind::kClickLog) return true;
  if (data::is_columnar(kind)) return false;
  const std::string line = first_line(path);
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
