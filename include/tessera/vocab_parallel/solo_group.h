// tessera/vocab_parallel/solo_group.h — the group of this rank alone.

#pragma once

#include <optional>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::vocab_parallel {

/// Returns `group`, or a group of one. The latter is made once and kept until the process ends.
TESSERA_API comm::Group group_or_solo(const std::optional<comm::Group>& group);

}  // namespace tessera::vocab_parallel
