// The page of a run: text, curves, tiles, and what is read from a folder.

#include <cmath>
#include <cstdlib>
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "report/chart.h"
#include "report/html.h"
#include "report/page.h"
#include "report/placement_picture.h"
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
  EXPECT_EQ(count_text(1234567), "1\u202f234\u202f567");
  EXPECT_EQ(count_text(999), "999");
}

TEST(Chart, TicksAreRoundAndCover) {
  EXPECT_EQ(ticks(0, 10, 5), (std::vector<double>{0, 2, 4, 6, 8, 10}));
  const auto fine = ticks(0.681, 0.811, 5);
  EXPECT_LE(fine.front(), 0.681);
  EXPECT_GE(fine.back(), 0.811);
  EXPECT_EQ(ticks(3, 3, 5), std::vector<double>{3});
}

TEST(Chart, SmoothIsTheMeanOfAConstant) {
  const auto smoothed = smooth({{1, 2}, {2, std::nan("")}, {3, 2}, {4, 2}}, 10);
  ASSERT_EQ(smoothed.size(), 3U);  // a gap has no mean
  for (const auto& [x, y] : smoothed) EXPECT_DOUBLE_EQ(y, 2);
}

TEST(Chart, KeepsThePeaksOfManyPoints) {
  Chart chart;
  chart.id = "c";
  chart.x_name = "step";
  chart.curves.push_back({"loss", "c-mean", {}, false});
  for (int i = 0; i < 100'000; ++i) chart.curves[0].points.emplace_back(i, i == 54'321 ? 7 : 0);
  const std::string html = chart_figure(chart, "");
  EXPECT_LT(html.size(), 60'000U);
  EXPECT_THAT(html, HasSubstr("[54321.0,7.0]"));
  chart.curves[0].points = {{1, std::nan("")}};
  EXPECT_EQ(chart_figure(chart, ""), "");
}

TEST(Chart, ShowsPointsThatNoLineReaches) {
  Chart chart;
  chart.id = "c";
  chart.x_name = "step";
  const auto num_dots = [&](std::vector<double> values) {
    chart.curves = {{"loss", "c-mean", {}, false}};
    for (std::size_t i = 0; i < values.size(); ++i)
      chart.curves[0].points.emplace_back(i, values[i]);
    const std::string html = chart_figure(chart, "");
    std::size_t count = 0;
    for (auto at = html.find("h0"); at != std::string::npos; at = html.find("h0", at + 1)) ++count;
    return count;
  };
  const double none = std::nan("");
  EXPECT_EQ(num_dots({0.7}), 1);
  EXPECT_EQ(num_dots({0.7, none}), 1);
  EXPECT_EQ(num_dots({0.7, 0.6, none}), 0);
  EXPECT_EQ(num_dots({0.7, none, 0.5, none, 0.6, 0.7}), 2);
}

TEST(Placement, TilesFillTheSquareByTheirSizes) {
  const std::vector<double> sizes{60, 25, 10, 3, 1, 1};
  for (const double aspect : {0.5, 1.25, 4.0}) {
    const auto tiles = squarify(sizes, aspect);
    ASSERT_EQ(tiles.size(), sizes.size());
    for (std::size_t i = 0; i < tiles.size(); ++i) {
      EXPECT_NEAR(tiles[i].width * tiles[i].height, sizes[i] / 100, 1e-9);
      EXPECT_GE(tiles[i].left, -1e-9);
      EXPECT_LE(tiles[i].left + tiles[i].width, 1 + 1e-9);
      EXPECT_LE(tiles[i].top + tiles[i].height, 1 + 1e-9);
      for (std::size_t j = 0; j < i; ++j) {
        const double across =
            std::min(tiles[i].left + tiles[i].width, tiles[j].left + tiles[j].width) -
            std::max(tiles[i].left, tiles[j].left);
        const double down =
            std::min(tiles[i].top + tiles[i].height, tiles[j].top + tiles[j].height) -
            std::max(tiles[i].top, tiles[j].top);
        EXPECT_FALSE(across > 1e-9 && down > 1e-9) << "tiles " << i << " and " << j << " overlap";
      }
    }
  }
  EXPECT_TRUE(squarify({}, 1).empty());
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
  EXPECT_THAT(page, HasSubstr("No step was logged."));
  EXPECT_THAT(page, HasSubstr("</html>"));
}

TEST(Page, ShowsTheFiguresOfAnyWorkload) {
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
  const std::string page = make_page(run);
  for (const char* text : {"Atoms per second", "Energy error", "Force error", "<td>0.25</td>"}) {
    EXPECT_THAT(page, HasSubstr(text));
  }
  for (const char* text : {"Log loss", "Samples", "AUC"}) EXPECT_THAT(page, Not(HasSubstr(text)));
}

TEST(Page, BelievesNoName) {
  RunRecord run;
  run.unit = "<script>9</script>";
  run.evals = {{1, kMissing, kMissing, kMissing, kMissing, 0, {{"<script>9</script>", 1.0}}}};
  run.name = "<script>1</script>";
  run.workload = "<b>";
  run.config = "</pre><script>2</script>";
  run.facts = {{"<i>", "<script>3</script>"}};
  run.tables = {{"<script>4</script>", 2, 2, 16, "<script>5</script>", {{0, 0, 2, 0, 2, 16}}}};
  run.steps = {{1, 0.5, 0.1, 10, 0.1, 0.01}};
  run.breakdowns = {{0, 1, 0.1, {{"<script>6</script>", {0.1, 0}}}}};
  run.spans = {{0, 0, "<script>7</script>", "<script>8</script>", 1, false, 0, 5}};
  const std::string page = make_page(run);
  for (int i = 1; i <= 9; ++i) {
    EXPECT_THAT(page, Not(HasSubstr("<script>" + std::to_string(i))));
  }
}

}  // namespace
}  // namespace tessera::workloads::report
