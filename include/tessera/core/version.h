// tessera/core/version.h — which Tessera this is, and what it was built against.

#pragma once

#include <string>

#include "tessera/core/export.h"

namespace tessera {

inline constexpr int kVersionMajor = 0;
inline constexpr int kVersionMinor = 1;
inline constexpr int kVersionPatch = 0;

/// "0.1.0".
TESSERA_API std::string version();

/// The LibTorch this library was compiled against, e.g. "2.13.0".
TESSERA_API std::string torch_version();

}  // namespace tessera
