#include "report/run_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace tessera::workloads::report {
namespace {

std::string cause() { return std::strerror(errno); }

// What of `text` belongs to steps up to `last`; half a line at the end, of a process that was
// killed, goes too.
std::string lines_until(const std::string& text, std::int64_t last) {
  std::string kept;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) continue;
    if (json.contains("step") && json["step"].is_number() &&
        json["step"].get<std::int64_t>() > last) {
      continue;
    }
    const std::string kind = json.value("kind", "");
    if (kind == "breakdown" || kind == "end") continue;
    kept += line + "\n";
  }
  return kept;
}

}  // namespace

std::string make_run_folder(const std::string& root) {
  std::error_code error;
  std::filesystem::create_directories(root, error);
  if (error) throw Error("report: cannot make the folder " + root + ": " + error.message() + ".");
  const std::time_t now = std::time(nullptr);
  std::tm day{};
  localtime_r(&now, &day);
  char date[32];
  std::strftime(date, sizeof(date), "%Y-%m-%d", &day);
  for (int count = 1; count < 100'000; ++count) {
    const std::string path = root + "/" + date + "-" + std::to_string(count);
    if (mkdir(path.c_str(), 0777) == 0) return path;
    if (errno != EEXIST)
      throw Error("report: cannot make the folder " + path + ": " + cause() + ".");
  }
  throw Error("report: " + root + " holds too many runs of today. Choose another folder.");
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error("report: cannot read " + path + ": " + cause() + ".");
  std::ostringstream text;
  text << file.rdbuf();
  if (file.bad()) throw Error("report: cannot read " + path + ": " + cause() + ".");
  return text.str();
}

void write_text(const std::string& path, const std::string& text) {
  // A name that no file of the user's has.
  const std::string fresh = path + ".partial-" + std::to_string(::getpid());
  std::ofstream file(fresh, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (file && std::rename(fresh.c_str(), path.c_str()) == 0) return;
  const std::string why = cause();
  ::unlink(fresh.c_str());
  throw Error("report: cannot write " + path + ": " + why + ".");
}

MetricsFile::MetricsFile(const std::string& path, std::int64_t keep_until)
    : file_(nullptr, &std::fclose), path_(path) {
  if (keep_until >= 0 && std::filesystem::exists(path)) {
    write_text(path, lines_until(read_text(path), keep_until));
  }
  file_.reset(std::fopen(path.c_str(), "ab"));
  if (file_ == nullptr) throw Error("report: cannot write " + path + ": " + cause() + ".");
}

void MetricsFile::add(const nlohmann::ordered_json& line) {
  // Names may come from files of any encoding; what is not UTF-8 is replaced.
  const std::string text =
      line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  if (std::fwrite(text.data(), 1, text.size(), file_.get()) != text.size() ||
      std::fflush(file_.get()) != 0) {
    throw Error("report: cannot write " + path_ + ": " + cause() + ".");
  }
}

}  // namespace tessera::workloads::report
