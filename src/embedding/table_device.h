// src/embedding/table_device.h — a call of a batch of tables as the CUDA kernels take it.

#pragma once

#include <cstdint>

#include <c10/core/Device.h>

#include "embedding/table_pass.h"
#include "kernels/cuda/table_launch.h"

namespace tessera::embedding::detail {

/// The call with its features on the device. They are the same in most calls, and are sent again
/// only if they have changed.
kernels::cuda::TableCall device_call(const TablePass& pass, Workspace& workspace,
                                     c10::Device device);
/// The table of each feature, on the device; after device_call.
const std::int32_t* device_tables_of(const TablePass& pass, const Workspace& workspace);

}  // namespace tessera::embedding::detail
