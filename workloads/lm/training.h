// lm/training.h — the small GPT on a text, on a mesh of data and vocabulary ranks, as the trainer
// wants it.

#pragma once

#include <memory>

#include "lm/settings.h"
#include "tessera/comm/group.h"
#include "trainer/workload.h"

namespace tessera::workloads::lm {

/// For a given seed the losses are the same, to rounding, for every number of ranks and every mesh;
/// checkpoints load on any mesh. Collective. Throws ValueError if the ranks do not divide into the
/// mesh, or the batch over the data ranks. `settings` must outlive it.
std::unique_ptr<trainer::AnyWorkload> make_workload(const Settings& settings,
                                                    const comm::Group& world);

}  // namespace tessera::workloads::lm
