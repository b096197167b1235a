#include "data/converted.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "data/input.h"
#include "dlrm/click_file.h"
#include "dlrm/mapped_file.h"

namespace tessera::workloads::data {
namespace {

namespace fs = std::filesystem;

// The text of all that decides what the log holds.
std::string key_of(const std::vector<std::string>& files, const Schema& schema,
                   const TableOptions& options) {
  std::string key = schema.text() + (options.has_no_label ? "no label\n" : "\n") +
                    (options.label_may_miss ? "or none\n" : "\n");
  for (const FeatureColumn& feature : schema.features) {
    for (const std::string& value : feature.values) key += value + "\n";
  }
  for (const std::string& file : files) {
    struct stat facts{};
    if (::stat(file.c_str(), &facts) != 0) {
      throw DataError(file + ": cannot be opened: " + std::strerror(errno) + ".");
    }
    if (!S_ISREG(facts.st_mode)) {
      throw DataError(file + ": is no file; a pipe is converted by tessera data convert.");
    }
    key += fs::absolute(file).lexically_normal().string() + "\n" + std::to_string(facts.st_size) +
           " " + std::to_string(facts.st_mtim.tv_sec) + "." +
           std::to_string(facts.st_mtim.tv_nsec) + "\n";
  }
  return key;
}

// Writes the whole log, or throws and leaves nothing.
TableReport write_log(const std::vector<std::string>& files, const std::string& names,
                      const Schema& schema, const TableOptions& options, const std::string& path) {
  std::error_code error;
  fs::create_directories(cache_folder(), error);
  dlrm::ClickFileWriter writer(path, schema.click_schema());
  TableReport report = read_tables(files, schema, options,
                                   [&](dlrm::SampleBlock& samples) { writer.append(samples); });
  if (report.num_samples == 0) throw DataError(names + ": there is no sample in it.");
  writer.finish();
  return report;
}

struct Wanted {
  std::vector<std::string> files;
  Schema schema;
  std::string path;
};

Wanted wanted(const std::string& names, const std::string& schema, const TableOptions& options) {
  if (schema.empty()) {
    throw DataError(names + ": is no click log, and --schema does not say what its columns are. " +
                    "tessera data schema " + names + " --out schema.toml guesses one.");
  }
  Wanted all{files_of(names), read_schema(schema), ""};
  char name[48];
  const std::string key = key_of(all.files, all.schema, options);
  std::snprintf(name, sizeof(name), "%016llx%016llx.click",
                static_cast<unsigned long long>(hash_of(key)),
                static_cast<unsigned long long>(hash_of(key + "2")));
  all.path = cache_folder() + "/" + name;
  return all;
}

}  // namespace

std::string cache_folder() {
  const auto value = [](const char* name) {
    const char* text = std::getenv(name);
    return std::string(text == nullptr ? "" : text);
  };
  if (const std::string own = value("TESSERA_CACHE"); !own.empty()) return own;
  if (const std::string all = value("XDG_CACHE_HOME"); !all.empty()) return all + "/tessera";
  const std::string home = value("HOME");
  return (home.empty() ? "/tmp" : home) + "/.cache/tessera";
}

bool is_table(const std::string& name) {
  if (name.empty() || name == "synthetic") return false;
  if (!fs::exists(name)) return true;  // a pattern, or several
  const FileKind kind = content_of(front_of(name, 64)).kind;
  return kind != FileKind::kClickLog;
}

std::string converted_path(const std::string& names, const std::string& schema,
                           const TableOptions& options) {
  return wanted(names, schema, options).path;
}

Converted convert_once(const std::string& names, const std::string& schema,
                       const TableOptions& options) {
  const Wanted all = wanted(names, schema, options);
  Converted result{all.path};
  if (fs::exists(all.path)) return result;
  result.report = write_log(all.files, names, all.schema, options, all.path);
  result.is_new = true;
  return result;
}

Converted convert_standard_input(const std::string& schema) {
  // A run that goes on finds it from wherever that is.
  const std::string folder = fs::absolute(cache_folder()).lexically_normal().string();
  const std::string draft = folder + "/stdin-" + std::to_string(::getpid()) + ".draft";
  Converted result;
  result.report = write_log({"-"}, "standard input", read_schema(schema), {}, draft);
  char name[32];
  std::snprintf(name, sizeof(name), "stdin-%016llx.click",
                static_cast<unsigned long long>(hash_of(dlrm::MappedFile(draft).bytes())));
  result.path = folder + "/" + name;
  result.is_new = !fs::exists(result.path);
  std::error_code error;
  fs::rename(draft, result.path, error);
  if (!error) return result;
  const std::string why = error.message();
  fs::remove(draft, error);
  throw DataError(result.path + ": cannot be written: " + why + ".");
}

bool is_same_meaning(const std::string& one, const std::string& other) {
  if (one == other) return true;
  const auto meaning = [](const std::string& text) {
    Schema schema = parse_schema(text, "a schema");
    schema.format = Format::kAny;
    schema.separator = 0;
    schema.columns.clear();
    return schema.text();
  };
  return meaning(one) == meaning(other);
}

}  // namespace tessera::workloads::data
