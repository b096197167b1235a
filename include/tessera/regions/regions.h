// tessera/regions/regions.h — all differentiable operators between placements.

#pragma once

#include "tessera/regions/copy_reduce.h"     // IWYU pragma: export
#include "tessera/regions/gather_scatter.h"  // IWYU pragma: export
#include "tessera/regions/gather_shared.h"   // IWYU pragma: export
#include "tessera/regions/placement.h"       // IWYU pragma: export
