// tests/faults/worker/modes.h — what the worker can do. Each returns the exit code of the process.

#pragma once

#include "options.h"

namespace tessera::faults {

/// Repeats one collective until something happens; one rank may be told to misbehave.
int run_loop(const Options& options);
/// Runs every collective on many sizes and types and compares with values known beforehand.
int run_collectives(const Options& options);
/// Lets one rank call something else, in every way there is, each on a fresh group.
int run_mismatches(const Options& options);
/// Calls with wrong arguments, a wrong mesh, and a group that was aborted.
int run_bad_input(const Options& options);
/// Makes and destroys groups and runs many steps; reports memory, descriptors and threads.
int run_leaks(const Options& options);
/// Ends processes without taking their groups down, many times.
int run_exits(const Options& options);
/// One process that ends with its groups alive.
int run_exit(const Options& options);
/// Joins the job, tells so, and leaves.
int run_join(const Options& options);
/// Makes one group on a store that the caller names, under a rank that the caller names.
int run_claim(const Options& options);

/// Makes groups of all ranks, one after the other, until something happens.
int run_groups(const Options& options);
/// Two ranks; the first forks a child that tries everything with its parent's group.
int run_forks(const Options& options);
/// Kills a rank of each of many short jobs; see short_jobs.h.
int run_kills(const Options& options);
/// Two ranks that work while they fork at any moment.
int run_fork_places(const Options& options);
/// Two ranks, of which the first is refused a thread or descriptors, in one job after the other.
int run_scarcity(const Options& options);

/// From now on the system refuses this process descriptors of other processes.
void refuse_pidfds();
/// Makes this process large, in small pages.
void take_memory(long mebibytes);

}  // namespace tessera::faults
