// cli/worker/dlrm_words.h — what the words of `tessera train dlrm` mean to the library.

#pragma once

#include "dlrm/from_settings.h"

namespace tessera::cli {

using workloads::dlrm::kModule;
using workloads::dlrm::log_options;
using workloads::dlrm::plan_of;

}  // namespace tessera::cli
