// launch/memory_kill.h — was the kernel short of memory?

#pragma once

#include <cstdint>

namespace tessera::launch {

/// Returns how often the out-of-memory killer struck in this process's control group, or on this
/// machine if the group does not say. Two readings tell whether it struck in between.
int64_t num_memory_kills();

}  // namespace tessera::launch
