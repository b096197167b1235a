// The page of a run: text, curves, tiles, and what is read from a folder.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "report/curves.h"
#include "report/html.h"
#include "report/page.h"
#include "report/run_facts.h"
#include "report/run_folder.h"

namespace tessera::workloads::report {
namespace {

using testing::HasSubstr;
using testing::Not;

struct Folder {
  Folder() {
    char name[] = "/tmp/tessera_report_XXXXXX";
    path = mkdtemp(name);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string file(const char* name) const { return path + "/" + name; }
  std::string path;
};

std::string error_of(const std::string& folder) {
  try {
    read_run(folder);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Html, EscapesWhatMeansSomething) {
  EXPECT_EQ(escape("<a href=\"x\">'&'</a>"),
            "&lt;a href=&quot;x&quot;&gt;&#39;&amp;&#39;&lt;/a&gt;");
  EXPECT_THAT(escape_json("</script>"), Not(HasSubstr("<")));
}

TEST(Html, WritesNumbersForPeople) {
  EXPECT_EQ(number(0.44171234), "0.441712");
  EXPECT_EQ(number(std::nan("")), "–");
  EXPECT_EQ(short_number(812345), "812k");
  EXPECT_EQ(short_number(999.9e3), "1.00M");
  EXPECT_EQ(short_number(42), "42");
  EXPECT_EQ(bytes_text(512), "512 B");
  EXPECT_EQ(bytes_text(102.4e6), "102 MB");
  EXPECT_EQ(seconds_text(0.0193), "19.3 ms");
  EXPECT_EQ(seconds_text(320), "5 min 20 s");
}

TEST(Curves, SmoothIsCentredAndKeepsAConstant) {
  const double none = std::nan("");
  const auto constant = smooth({2, none, 2, 2}, 10);
  ASSERT_EQ(constant.size(), 4U);
  EXPECT_TRUE(std::isnan(constant[1]));  // a gap has no mean
  for (const std::size_t i : {0, 2, 3}) EXPECT_DOUBLE_EQ(constant[i], 2);
  // The same from both sides: a peak stays where it is, and a straight line a straight line inside.
  std::vector<double> peak(101, 0.0);
  peak[50] = 1;
  const auto smoothed = smooth(peak, 5);
  for (std::size_t i = 1; i <= 20; ++i) {
    EXPECT_DOUBLE_EQ(smoothed[50 - i], smoothed[50 + i]);
    EXPECT_LT(smoothed[50 + i], smoothed[50 + i - 1]);
  }
  std::vector<double> line(401);
  for (std::size_t i = 0; i < line.size(); ++i) line[i] = static_cast<double>(i);
  EXPECT_NEAR(smooth(line, 5)[200], 200, 1e-9);
  EXPECT_TRUE(smooth({}, 5).empty());
}

TEST(Curves, KeepThePeaksOfManySteps) {
  std::vector<StepRow> steps(100'000);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    steps[i] = {static_cast<std::int64_t>(i + 1),
                i == 54'321 ? 7.0 : 0.5,
                i == 777 ? 3.0 : 0.01,
                100,
                0.1,
                0};
  }
  const auto shown = shown_steps(steps);
  EXPECT_LE(shown.size(), 1602U);
  EXPECT_TRUE(std::is_sorted(shown.begin(), shown.end()));
  for (const std::size_t i :
       {std::size_t{0}, std::size_t{777}, std::size_t{54'321}, steps.size() - 1}) {
    EXPECT_TRUE(std::binary_search(shown.begin(), shown.end(), i)) << i;
  }
  steps.resize(1500);
  EXPECT_EQ(shown_steps(steps).size(), 1500U);
  EXPECT_TRUE(shown_steps({}).empty());
}

TEST(Curves, MedianIsOfWhatIsThere) {
  EXPECT_EQ(median({3, std::nan(""), 1, 2}), 2);
  EXPECT_TRUE(std::isnan(median({})));
}

TEST(RunFacts, CommandsCanBeTypedAgain) {
  EXPECT_EQ(command_text({"tessera", "train", "--data", "a b.tsv", "it's", ""}),
            "tessera train --data 'a b.tsv' 'it'\\''s' ''");
}

TEST(RunFolder, NamesAreOfTheDayAndFree) {
  const Folder folder;
  const std::string first = make_run_folder(folder.path + "/runs");
  const std::string second = make_run_folder(folder.path + "/runs");
  EXPECT_TRUE(first.ends_with("-1"));
  EXPECT_EQ(second, first.substr(0, first.size() - 1) + "2");
}

TEST(RunFolder, SaysWhyItCannotBeMade) {
  const Folder folder;
  write_text(folder.file("runs"), "");
  try {
    make_run_folder(folder.file("runs"));
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("report: cannot make the folder " + folder.file("runs")));
  }
}

TEST(MetricsFile, AResumedJobForgetsLaterSteps) {
  const Folder folder;
  const std::string path = folder.file(kMetricsFile);
  {
    MetricsFile metrics(path);
    metrics.add({{"kind", "run"}, {"ranks", 2}});
    for (int step = 1; step <= 5; ++step) metrics.add({{"kind", "step"}, {"step", step}});
    metrics.add({{"kind", "end"}, {"steps", 5}, {"seconds", 1.0}, {"samples", 10}});
  }
  write_text(path, read_text(path) + R"({"kind":"step","st)");  // killed here
  MetricsFile(path, 3).add({{"kind", "step"}, {"step", 4}, {"loss", std::nan("")}});
  const RunRecord run = read_run(folder.path);
  ASSERT_EQ(run.steps.size(), 4U);
  EXPECT_EQ(run.steps.back().step, 4);
  EXPECT_TRUE(std::isnan(run.steps.back().loss));
  EXPECT_FALSE(run.has_ended);
}

TEST(ReadRun, NamesFileAndLine) {
  const Folder folder;
  EXPECT_THAT(error_of(folder.path),
              HasSubstr("report: cannot read " + folder.path + "/metrics.jsonl: No such file"));
  write_text(folder.file(kMetricsFile), "{\"kind\":\"run\"}\n{\"kind\":\"step\"}\n");
  EXPECT_THAT(error_of(folder.path), HasSubstr("report: line 2 of"));
  write_text(folder.file(kMetricsFile), "{\"kind\":\"run\"}\n{\"kind\":\"st");
  EXPECT_EQ(error_of(folder.path), "");  // half a line at the end
  write_text(folder.file(kTraceFile), "[]");
  EXPECT_THAT(error_of(folder.path), HasSubstr("trace.json makes no sense"));
}

TEST(Page, OfAnEmptyRunIsStillAPage) {
  const std::string page = make_page(RunRecord{});
  EXPECT_THAT(page, HasSubstr("</html>"));
  EXPECT_THAT(page, Not(HasSubstr("{{")));  // every place is filled
}

TEST(Page, HoldsTheFiguresOfAnyWorkload) {
  const Folder folder;
  MetricsFile metrics(folder.file(kMetricsFile));
  metrics.add({{"kind", "run"}, {"workload", "gnn"}, {"ranks", 2}, {"unit", "atoms"}});
  for (int step = 1; step <= 2; ++step) {
    metrics.add({{"kind", "step"}, {"step", step}, {"loss", 1.0}, {"samples_per_second", 5.0}});
    metrics.add({{"kind", "eval"}, {"step", step}, {"energy_error", 0.25}, {"force_error", 0.5}});
  }
  const RunRecord run = read_run(folder.path);
  ASSERT_EQ(run.evals.size(), 2U);
  EXPECT_THAT(run.evals[1].others, testing::ElementsAre(testing::Pair("energy_error", 0.25),
                                                        testing::Pair("force_error", 0.5)));
  const auto data = page_data(run);
  EXPECT_EQ(data["unit"], "atoms");
  EXPECT_EQ(data["evals"][1].dump(), R"({"step":2,"energy_error":0.25,"force_error":0.5})");
  EXPECT_TRUE(data["series"]["seconds"][0].is_null());  // not known
  EXPECT_FALSE(data["has_ended"].get<bool>());
}

TEST(Page, KnowsWhereARunWasResumedAndWhatItRead) {
  const Folder folder;
  MetricsFile metrics(folder.file(kMetricsFile));
  metrics.add({{"kind", "run"},
               {"ranks", 1},
               {"planned_steps", 5},
               {"command", "tessera train dlrm"},
               {"data", {{{"path", "clicks.bin"}, {"bytes", 42}}, {{"path", "pipe"}}}}});
  metrics.add({{"kind", "calibration"}, {"step", 1}, {"predicted", {0.1}}, {"observed", {0.2}}});
  metrics.add({{"kind", "resume"}, {"step", 3}, {"planned_steps", 9}, {"command", "again"}});
  const auto data = page_data(read_run(folder.path));
  EXPECT_EQ(data["resumed"].dump(), "[3]");
  EXPECT_EQ(data["planned_steps"], 9);
  EXPECT_EQ(data["command"], "again");
  EXPECT_EQ(data["data"].dump(),
            R"([{"path":"clicks.bin","bytes":42},{"path":"pipe","bytes":null}])");
  EXPECT_EQ(data["calibration"].dump(), R"({"step":1,"predicted":[0.1],"observed":[0.2]})");
}

TEST(Page, BelievesNoName) {
  RunRecord run;
  run.unit = "<script>9</script>";
  run.evals = {{1, kMissing, kMissing, kMissing, kMissing, 0, {{"<script>9</script>", 1.0}}}};
  run.name = "<script>1</script>";
  run.workload = "<b>";
  run.config = "</pre><script>2</script>";
  run.facts = {{"<i>", "<script>3</script>"}};
  run.tables = {{"<script>4</script>", 2, 2, 16, "<script>5</script>", {{0, 0, 2, 0, 2, 16, 8}}}};
  run.steps = {{1, 0.5, 0.1, 10, 0.1, 0.01}};
  run.breakdowns = {{0, 1, 0.1, {{"<script>6</script>", {0.1, 0}}}}};
  run.spans = {{0, 0, "<script>7</script>", "<script>8</script>", 1, false, 0, 5}};
  run.command = run.resume = run.status = "<script>9</script>";
  run.data = {{"</script><script>9</script>", 1}};
  const std::string page = make_page(run);
  for (int i = 1; i <= 9; ++i) {
    EXPECT_THAT(page, Not(HasSubstr("<script>" + std::to_string(i))));
  }
}

}  // namespace
}  // namespace tessera::workloads::report
