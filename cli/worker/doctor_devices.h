// cli/worker/doctor_devices.h — which GPUs LibTorch sees, and whether they compute.

#pragma once

#include <nlohmann/json.hpp>

namespace tessera::cli {

/// {"build": "13.0", "driver": "13.1", "devices": [{"name", "total_bytes", "free_bytes",
/// "error"}]}; versions are null where nobody says, `error` is null for a device that adds a
/// thousand ones right.
nlohmann::ordered_json examine_devices();

}  // namespace tessera::cli
