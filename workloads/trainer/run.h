// trainer/run.h — a training as a program: ranks, signals, run folder, what is said and written.

#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "trainer/metrics.h"
#include "trainer/workload.h"

namespace tessera::trainer {

/// Makes the workload of one rank. Collective.
using Maker = std::function<std::unique_ptr<AnyWorkload>(const comm::Group& world)>;

/// Trains as one rank of a job and returns its exit code: 0, 1 for a loss that is not a number, 65
/// for data or checkpoints that cannot be used, 78 for settings that make no sense, with a line on
/// standard error. SIGTERM and SIGINT end it after a checkpoint, with 0.
///
/// Rank 0 shows progress and writes a run folder: config.toml, metrics.jsonl, trace.json and
/// report.html. A run that goes on writes config.toml anew, with the settings it goes on with.
/// It also writes events for TensorBoard there, unless the settings say otherwise. What another
/// rank has caused is thrown as comm::Error. `watch` is told of every step and evaluation.
TESSERA_API int run(Settings& settings, const Maker& make, const MetricsCallback& watch = {});

/// Whether this process was told to stop, by SIGTERM or SIGINT: for workloads that wait for
/// samples.
TESSERA_API bool told_to_stop() noexcept;

/// The same for a program of its own, started by `tessera run` or torchrun: `words` are its flags.
/// `saved` is another object of the kind of `settings`. Prints help and configuration if asked to;
/// mistakes are exit code 2 or 78.
TESSERA_API int run_program(Settings& settings, Settings& saved,
                            const std::vector<std::string>& words, const Maker& make,
                            const MetricsCallback& watch = {});

}  // namespace tessera::trainer
