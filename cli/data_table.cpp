#include "data_table.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include "data/read_table.h"
#include "dlrm/click_file.h"
#include "tessera/launch/exit_code.h"

namespace tessera::cli {
namespace {

using workloads::data::DataError;
using workloads::data::Schema;
using workloads::data::TableReport;
using Json = nlohmann::ordered_json;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A file that is there is replaced in one step, or stays as it is.
void write_whole(const std::string& path, const std::string& text) {
  const std::string draft = path + ".partial-" + std::to_string(::getpid());
  std::ofstream file(draft, std::ios::binary);
  file << text;
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(draft, path, error);
  if (file && !error) return;
  std::filesystem::remove(draft, error);
  throw DataError(path + ": cannot be written.");
}

Json json_of(const TableReport& report, double seconds) {
  return {{"records", report.num_records}, {"samples", report.num_samples},
          {"bad_lines", report.num_bad},   {"first_bad", report.first_bad},
          {"bytes", report.num_bytes},     {"seconds", seconds}};
}

void print(const Json& answer) {
  std::printf("%s\n", answer.dump(2, ' ', false, Json::error_handler_t::replace).c_str());
}

void say_bad_lines(const TableReport& report) {
  if (report.num_bad == 0) return;
  std::printf("left out %lld bad lines\n", static_cast<long long>(report.num_bad));
  for (const std::string& one : report.first_bad) std::printf("  %s\n", one.c_str());
  const auto others = report.num_bad - static_cast<std::int64_t>(report.first_bad.size());
  if (others > 0) std::printf("  and %lld more\n", static_cast<long long>(others));
}

}  // namespace

int guess_schema(const std::string& path, const TableWords& words) {
  if (!words.to.empty()) workloads::data::check_apart({path}, words.to);
  const std::string text = workloads::data::guess_schema(path);
  if (words.to.empty()) {
    std::fputs(text.c_str(), stdout);
  } else {
    write_whole(words.to, text);
    std::printf("wrote %s; read and correct it, then tessera data convert --schema %s\n",
                words.to.c_str(), words.to.c_str());
  }
  return launch::kExitOk;
}

int convert_tables(const std::vector<std::string>& names, const TableWords& words) {
  const double begin = now();
  const std::vector<std::string> files = workloads::data::expand(names);
  workloads::data::check_apart(files, words.to);
  const Schema schema = workloads::data::read_schema(words.schema);
  workloads::dlrm::ClickFileWriter writer(words.to, schema.click_schema(),
                                          {.half_dense = words.half});
  const TableReport report = workloads::data::read_tables(
      files, schema, {.skips_bad = words.skips_bad, .has_no_label = words.has_no_label},
      [&](workloads::dlrm::SampleBlock& samples) { writer.append(samples); });
  if (report.num_samples == 0) {
    throw DataError("there is no sample in " + names[0] +
                    (names.size() > 1 ? " and the others" : "") +
                    (report.first_bad.empty() ? "" : ": " + report.first_bad[0]) + ".");
  }
  writer.finish();
  const double seconds = now() - begin;
  if (words.wants_json) {
    Json answer = {{"path", words.to}};
    answer.update(json_of(report, seconds));
    print(answer);
    return launch::kExitOk;
  }
  std::printf("wrote %lld samples to %s: %.1f MB in %.2f s, %.0f MB/s\n",
              static_cast<long long>(report.num_samples), words.to.c_str(),
              static_cast<double>(report.num_bytes) / 1e6, seconds,
              static_cast<double>(report.num_bytes) / 1e6 / seconds);
  say_bad_lines(report);
  return launch::kExitOk;
}

int check_tables(const std::vector<std::string>& names, const TableWords& words) {
  const double begin = now();
  const Schema schema = workloads::data::read_schema(words.schema);
  const TableReport report =
      workloads::data::read_tables(workloads::data::expand(names), schema, {.skips_bad = true},
                                   [](workloads::dlrm::SampleBlock&) {});
  const bool is_good = report.num_bad == 0 && report.num_samples > 0;
  if (words.wants_json) {
    Json answer = {{"good", is_good}};
    answer.update(json_of(report, now() - begin));
    print(answer);
  } else {
    std::printf("%s %lld records, %lld samples\n", is_good ? "good    " : "damaged ",
                static_cast<long long>(report.num_records),
                static_cast<long long>(report.num_samples));
    say_bad_lines(report);
  }
  return is_good ? launch::kExitOk : launch::kExitData;
}

}  // namespace tessera::cli
