// tessera doctor — what this build and this machine can do, and whether two ranks work.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "doctor/profile.h"
#include "doctor/report.h"
#include "doctor/security.h"
#include "flags.h"
#include "host_flags.h"
#include "kernels/dispatch.h"
#include "tessera/launch/exit_code.h"
#include "usage.h"
#include "verb.h"

namespace tessera::cli {
namespace {

constexpr std::string_view kHelp =
    R"(tessera doctor [--quick | --security | --profile] [--json]

  tessera doctor                    a page for people
  tessera doctor --json             the same for programs, and for bug reports
  tessera doctor --security         who could reach a job on this machine
  tessera doctor --profile          measure what tessera plan and tessera train should know of it
  tessera doctor --profile --nnodes 2 --node-rank 0 --rdzv-endpoint H:P --secret-file F
                                    the same on every host, with the links between them

Shows versions, engines, instruction set, cores, memory, limits and GPUs; lets two ranks check the
values of the collectives on every engine; measures memory and all-reduce. Takes 2 to 5 seconds.

  --quick      fewer repetitions: at most 2 seconds
  --security   runs a job of two ranks, lists what it listens on, and checks folders and secret
  --profile    measures rows, steps, exchanges and dense layers with a rank per core: at most 20 s
  --out FILE   where the profile is kept ($TESSERA_PROFILE, or tessera/machine.json in the user's
               cache folder)
  -n, --ranks N  ranks of --profile on this host (one per core, at most 8)
  --nnodes K --node-rank R --rdzv-endpoint H:P --secret-file FILE
  --master-addr --master-port --rdzv-id --rdzv-timeout --rdzv-backend
  --rdzv-conf --standalone --insecure-no-auth
               hosts of --profile, as in `tessera run`; each keeps its own file
  --json       one JSON object; docs/doctor.md describes its keys

Exit codes: 0 good, 1 the self-test failed or a door is open. More: docs/doctor.md
)";

constexpr int kExitFailed = 1;

struct Words {
  bool is_quick = false;
  bool as_json = false;
  bool is_about_security = false;
  bool wants_profile = false;
  std::string out;
  int num_ranks = 0;
  HostWords hosts;
  bool wants_help = false;
};

void define_flags(CLI::App& app, Words& words) {
  app.set_help_flag();
  app.add_flag("--quick", words.is_quick);
  app.add_flag("--json", words.as_json);
  app.add_flag("--security", words.is_about_security);
  app.add_flag("--profile", words.wants_profile);
  app.add_option("--out", words.out)->take_last();
  app.add_option("-n,--ranks", words.num_ranks)->take_last()->check(CLI::Range(1, 256));
  define_host_flags(app, words.hosts);
  app.add_flag("-h,--help", words.wants_help);
}

Findings examine(bool is_quick) {
  Findings findings;
  findings.machine = read_machine();
  findings.active_isa = kernels::name_of(kernels::active_isa());
  for (const kernels::Isa isa : kernels::supported_isas()) {
    findings.available_isas.emplace_back(kernels::name_of(isa));
  }
  // Larger than the caches of one core complex; little where memory is short.
  const std::size_t bytes = std::min<std::size_t>(std::size_t{is_quick ? 64u : 128u} << 20,
                                                  findings.machine.memory_available / 64);
  findings.num_threads = std::clamp(findings.machine.cores_left, 1, 16);
  findings.one_thread = measure_memory(1, bytes, is_quick ? 3 : 7);
  findings.all_threads = measure_memory(findings.num_threads, bytes, is_quick ? 3 : 7);
  findings.ping_nanoseconds = measure_ping();
  findings.self_test = run_self_test(is_quick);
  return findings;
}

int run(const std::vector<std::string>& words) {
  CLI::App app("", "doctor");
  Words given;
  define_flags(app, given);
  const SplitWords split = split_words(app, words);
  read_flags(app, split.flags);
  if (given.wants_help) return print_help(kHelp);
  if (!split.rest.empty())
    throw UsageError("doctor: takes flags only, not '" + split.rest[0] + "'");
  launch::RunOptions hosts;
  read_hosts("doctor", given.hosts, hosts);
  if (!given.wants_profile && (!given.out.empty() || given.num_ranks > 0 || hosts.num_nodes > 1)) {
    throw UsageError("doctor: --out, --ranks and --nnodes are for --profile");
  }
  if (given.wants_profile) {
    ProfileWords profile{.out = given.out, .num_ranks = given.num_ranks};
    profile.is_quick = given.is_quick;
    profile.as_json = given.as_json;
    if (hosts.num_nodes > 1) {
      profile.hosts = run_words(given.hosts);
      profile.meeting = std::chrono::ceil<std::chrono::seconds>(hosts.rendezvous_timeout);
    }
    return run_profile(profile);
  }
  if (given.is_about_security) {
    const Security security = examine_security();
    const std::string text = given.as_json ? as_json(security).dump(2) + "\n" : as_text(security);
    std::fputs(text.c_str(), stdout);
    return security.problems.empty() ? launch::kExitOk : kExitFailed;
  }
  const Findings findings = examine(given.is_quick);
  if (given.as_json) {
    std::printf("%s\n", as_json(findings).dump(2).c_str());
  } else {
    const char* no_color = std::getenv("NO_COLOR");
    const bool use_color = isatty(STDOUT_FILENO) == 1 && (no_color == nullptr || *no_color == '\0');
    std::fputs(as_text(findings, use_color).c_str(), stdout);
  }
  return findings.self_test.passed ? launch::kExitOk : kExitFailed;
}

std::vector<std::string> flags() {
  CLI::App app("", "doctor");
  Words words;
  define_flags(app, words);
  return long_flags(app);
}

}  // namespace

const Verb kDoctorVerb{"doctor", "what this build and machine can do, and a two-rank self-test",
                       kHelp, run, flags};

}  // namespace tessera::cli
