// gnn/training.h — the network on energies and forces, over a data x graph mesh, as the trainer
// wants it.

#pragma once

#include <memory>

#include "gnn/settings.h"
#include "tessera/comm/group.h"
#include "trainer/workload.h"

namespace tessera::workloads::gnn {

/// Judges by "energy_error", mean absolute per atom, "force_error" and "stress_error", per
/// component, as far as the structures have them; `results`
/// holds the same before the first step as "…_before", "halo_rows" (mean over the job's ranks and
/// structures) and the number of "parameters". All ranks end with the same parameters. Collective.
/// Throws ValueError for settings that make no sense. `settings` must outlive it.
std::unique_ptr<trainer::AnyWorkload> make_workload(const Settings& settings,
                                                    const comm::Group& world);

}  // namespace tessera::workloads::gnn
