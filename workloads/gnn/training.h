// gnn/training.h — the network on energies and forces, over a data x graph mesh, as the trainer
// wants it.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "gnn/settings.h"
#include "tessera/comm/group.h"
#include "trainer/train.h"
#include "trainer/workload.h"

namespace tessera::workloads::gnn {

/// Judges by "energy_error", mean absolute per atom, "force_error" and "stress_error", per
/// component, as far as the structures have them; `results`
/// holds the same before the first step as "…_before", "halo_rows" (mean over the job's ranks and
/// structures) and the number of "parameters". All ranks end with the same parameters. Collective.
/// Throws ValueError for settings that make no sense. `settings` must outlive it.
std::unique_ptr<trainer::AnyWorkload> make_workload(const Settings& settings,
                                                    const comm::Group& world);

struct Judged {
  trainer::Judgement model;
  std::int64_t num_structures = 0;
  std::string predicted;  // as extended XYZ, if asked for; the same on every rank
};

/// Judges the model of a run: the checkpoint of `step` (-1: the newest) in the folder
/// `checkpoints`, on the structures of the files `data`, or without them on those that the run was
/// judged on. `predicts`: `data` needs no labels, and gets those of the model. Collective; every
/// structure lies over all ranks. Throws DataError for files that cannot be read and elements that
/// the model does not know, checkpoint::Error for a checkpoint that cannot be used.
Judged judge(const Settings& settings, const std::string& data, const std::string& checkpoints,
             std::int64_t step, bool predicts, const comm::Group& world);

}  // namespace tessera::workloads::gnn
