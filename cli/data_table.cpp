#include "data_table.h"

#include <chrono>
#include <cstdio>
#include <filesystem>

#include "data/input.h"
#include "data/read_table.h"
#include "data/whole_file.h"
#include "data_answer.h"
#include "dlrm/click_file.h"
#include "tessera/launch/exit_code.h"

namespace tessera::cli {
namespace {

using workloads::data::DataError;
using workloads::data::Schema;
using workloads::data::TableReport;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// All that the verb reads: the tables, the schema and its vocabularies.
std::vector<std::string> inputs_of(const std::vector<std::string>& files, const std::string& path,
                                   const Schema& schema) {
  std::vector<std::string> all = files;
  all.push_back(path);
  const auto folder = std::filesystem::path(path).parent_path();
  for (const auto& feature : schema.features) {
    if (!feature.vocabulary.empty()) all.push_back((folder / feature.vocabulary).string());
  }
  return all;
}

DataAnswer answer_of(const TableReport& report, double begin) {
  return {.unit = "records",
          .num_read = report.num_records,
          .num_samples = report.num_samples,
          .num_bad = report.num_bad,
          .num_bytes = report.num_bytes,
          .first_bad = report.first_bad,
          .bad_for_machines = report.first_bad,
          .seconds = now() - begin};
}

}  // namespace

int guess_schema(const std::string& path, const TableWords& words) {
  if (!words.to.empty()) workloads::data::check_apart({path}, words.to);
  const std::string text = workloads::data::guess_schema(path);
  if (words.to.empty()) {
    std::fputs(text.c_str(), stdout);
  } else {
    workloads::data::write_whole(words.to, text);
    std::printf("wrote %s; read and correct it, then tessera data convert --schema %s\n",
                words.to.c_str(), words.to.c_str());
  }
  return launch::kExitOk;
}

int convert_tables(const std::vector<std::string>& names, const TableWords& words) {
  const double begin = now();
  const std::vector<std::string> files = workloads::data::expand(names);
  const Schema schema = workloads::data::read_schema(words.schema);
  workloads::data::check_apart(inputs_of(files, words.schema, schema), words.to);
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
  return say_converted(answer_of(report, begin), words.to, words.wants_json);
}

int check_tables(const std::vector<std::string>& names, const TableWords& words) {
  const double begin = now();
  const Schema schema = workloads::data::read_schema(words.schema);
  const TableReport report =
      workloads::data::read_tables(workloads::data::expand(names), schema, {.skips_bad = true},
                                   [](workloads::dlrm::SampleBlock&) {});
  return say_checked(answer_of(report, begin), names[0], words.wants_json);
}

}  // namespace tessera::cli
