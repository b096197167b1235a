// fault_worker: one rank of a job that is about to go wrong. The drivers beside it (test_*.py)
// start it, break something, and read what it reports.

#include <cstdio>
#include <string>

#include "modes.h"

int main(int argc, char** argv) {
  using namespace tessera::faults;
  const struct {
    const char* name;
    int (*run)(const Options&);
  } modes[] = {
      {"loop", run_loop},
      {"collectives", run_collectives},
      {"mismatches", run_mismatches},
      {"bad-input", run_bad_input},
      {"leaks", run_leaks},
      {"exits", run_exits},
      {"exit", run_exit},
      {"join", run_join},
      {"claim", run_claim},
      {"groups", run_groups},
      {"forks", run_forks},
      {"kills", run_kills},
      {"fork-places", run_fork_places},
      {"scarcity", run_scarcity},
  };
  const std::string wanted = argc > 1 ? argv[1] : "";
  for (const auto& mode : modes) {
    // Nothing is caught here: what a mode lets go must reach the handler that comm::init installed.
    if (wanted == mode.name) return mode.run(Options(argc, argv));
  }
  std::fprintf(stderr, "usage: fault_worker mode [key=value...]\n");
  return 2;
}
