// checkpoint/managed_ids.h — the ids of tables of a fixed size in a State.

#pragma once

#include <memory>
#include <string>

#include "tessera/checkpoint/state.h"
#include "tessera/collision/sharded_managed_collision.h"

namespace tessera::checkpoint {

/// Adds a table's ids that every rank holds whole, as `prefix` and the names of the module's
/// buffers; beside them the ids that wait for the next interval, and how many ids there are.
void add_managed_ids(State& state, std::shared_ptr<collision::MCHManagedCollisionModule> ids,
                     const std::string& prefix);

/// The same for ids that are dealt over ranks, under the names they would have on one rank: each
/// part lies where its rows do. They load into parts that are unions of those saved, and into a
/// module that is not sharded. Saves are collective over the collection's group.
void add_managed_ids(State& state,
                     std::shared_ptr<collision::ShardedManagedCollisionCollection> ids,
                     const std::string& prefix);

}  // namespace tessera::checkpoint
