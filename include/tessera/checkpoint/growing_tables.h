// tessera/checkpoint/growing_tables.h — tables that grow in a State.
//
// A table is saved as lists in order of its 1024 buckets, so that any number of ranks loads what
// any other has saved and goes on to the same bits. Beside `<name>.weight`, [ids, columns]:
//
//   <name>.ids, .counts, .last_step   int64, one per row
//   <name>.bucket_rows                int64 [1024]: how many rows each bucket has
//   <name>.sketch, .sketch_buckets, .sketch_sightings   of ids that wait for admission, if any do
//   <name>.unknown                    [1, columns]: the row of ids without one, if it trains
//
// With `changes`, a delta holds the rows of changed ids alone, as lists of the
// same names with "@changed" behind them, and the ids that were removed: `<name>.removed`. Readers
// see the whole lists (checkpoint/manifest.h, ListDelta).

#pragma once

#include <memory>
#include <string>

#include "tessera/checkpoint/state.h"
#include "tessera/collision/growing_tables.h"
#include "tessera/core/export.h"

namespace tessera::checkpoint {

/// Adds growing tables: `<prefix>embedding_bags.<table>` or `embeddings.<table>`, and the state of
/// their optimizer under `optimizer_prefix`. Saves and loads are collective over the tables' group.
///
/// A load throws Error, and changes nothing, for tables of another id hash, seed or width, and for
/// lists that no table has written: an id twice, or in a bucket that is not its own.
///
/// With `changes`, of GrowingTables::track_changes, deltas hold what changed since its base; call
/// its `forget` after every save that is to be the base of the next. Without, they hold everything.
TESSERA_API void add_growing_tables(State& state, std::shared_ptr<collision::GrowingTables> tables,
                                    const std::string& prefix = "model.",
                                    const std::string& optimizer_prefix = "optimizer.",
                                    std::shared_ptr<collision::GrowingChanges> changes = nullptr);

/// Adds what servers need of growing tables, for publications: ids, rows and the row of unknown
/// ids. Such a checkpoint cannot be loaded. Deltas hold what changed since the last `forget` of
/// what is returned.
TESSERA_API std::shared_ptr<collision::GrowingChanges> add_published_rows(
    State& state, const std::shared_ptr<collision::GrowingTables>& tables,
    const std::string& prefix = "model.");

}  // namespace tessera::checkpoint
