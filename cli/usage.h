// cli/usage.h — wrong words on the command line: one line, a suggestion, exit code 2.

#pragma once

#include "settings/usage.h"

namespace tessera::cli {
using namespace settings;
}  // namespace tessera::cli
