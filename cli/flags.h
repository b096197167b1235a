// cli/flags.h — how verbs read their flags: as settings do.

#pragma once

#include "settings/flags.h"

namespace tessera::cli {
using namespace settings;
}  // namespace tessera::cli
