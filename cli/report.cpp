// tessera report — makes the page of a run folder anew.

#include <cstdio>

#include "flags.h"
#include "report/page.h"
#include "report/run_folder.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "usage.h"
#include "verb.h"

namespace tessera::cli {
namespace {

constexpr std::string_view kHelp =
    R"(tessera report <run folder>...

  tessera report runs/2026-11-15-1      write runs/2026-11-15-1/report.html

Makes report.html of metrics.jsonl, trace.json and config.toml in the folder that a training wrote.
tessera train dlrm does so at its end; this verb does it for a run that was killed, or that is
still running. The page is one file, and needs no network and no other file.
More: docs/report.md
)";

void define(CLI::App& app, bool& wants_help) {
  app.set_help_flag();
  app.add_flag("-h,--help", wants_help);
}

int run(const std::vector<std::string>& words) {
  CLI::App app("", "report");
  bool wants_help = false;
  define(app, wants_help);
  const SplitWords split = split_words(app, words);
  read_flags(app, split.flags);
  if (wants_help) return print_help(kHelp);
  if (split.rest.empty()) throw UsageError("report: name a run folder, as in runs/2026-11-15-1");
  for (const std::string& folder : split.rest) {
    try {
      std::printf("report   %s\n", workloads::report::write_report(folder).c_str());
    } catch (const workloads::report::Error& error) {
      throw launch::LaunchError(launch::kExitData, error.what(),
                                "the folder is not one that a training wrote, or is damaged",
                                "name a folder that holds metrics.jsonl");
    }
  }
  return launch::kExitOk;
}

std::vector<std::string> flags() {
  CLI::App app("", "report");
  bool wants_help = false;
  define(app, wants_help);
  return long_flags(app);
}

}  // namespace

const Verb kReportVerb{"report", "make the page of a training's run folder", kHelp, run, flags};

}  // namespace tessera::cli
