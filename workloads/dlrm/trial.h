// dlrm/trial.h — what a step takes beside the tables, tried on this machine.

#pragma once

#include "dlrm/batch.h"
#include "dlrm/model.h"
#include "dlrm/settings.h"
#include "tessera/comm/group.h"
#include "tessera/planner/machine_profile.h"

namespace tessera::workloads::dlrm {

/// Seconds of reading a batch of `source`, of the dense layers and of their step, tried a few times
/// with a model of its own that nobody keeps, into `load`. Reading counts where the ranks of this
/// host leave no core to read on. Collective over the group, since ranks share a machine.
void time_dense(const Settings& settings, Dlrm& model, BatchSource& source,
                const comm::Group& group, planner::DenseLoad& load);

}  // namespace tessera::workloads::dlrm
