// src/collision/memory_headroom.h — how much more memory this process may take.

#pragma once

#include <cstddef>

namespace tessera::collision {

/// Bytes that can be taken before the machine, a control group of memory (of either version), or a
/// limit of the process is full, less a part that stays free for everything else: a 64th of the
/// limit, 16 to 512 MiB. Reads files of /proc and /sys, some tens of microseconds; takes no memory.
std::size_t memory_headroom() noexcept;

}  // namespace tessera::collision
