// src/serving/update.h — a published checkpoint becomes the next version of a store.

#pragma once

#include "serving/store.h"
#include "tessera/checkpoint/reader.h"
#include "tessera/serving/model.h"

namespace tessera::serving {

/// Writes rows and dense layers of `reader`'s checkpoint into `draft`, rounded as an export of it.
/// Throws checkpoint::Error naming what does not fit, and the row that cannot be kept.
UpdateReport write_update(const checkpoint::Reader& reader, const Store& store,
                          Store::Draft& draft);

}  // namespace tessera::serving
