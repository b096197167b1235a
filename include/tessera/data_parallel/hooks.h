// tessera/data_parallel/hooks.h — the ready-made communication hooks.
//
// Each function makes one hook for one model. Sparse gradients are averaged plainly by all of them.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <c10/core/ScalarType.h>

#include "tessera/core/export.h"
#include "tessera/data_parallel/comm_hook.h"

namespace tessera::data_parallel {

using HookPtr = std::shared_ptr<CommHook>;

/// Averages the buckets as they are.
TESSERA_API HookPtr all_reduce_hook();

/// Averages in `dtype` (float16, bfloat16; also on Gloo) and returns the result in the gradients'
/// own type. Half the bytes of float32. Throws ValueError for a type that does not float.
TESSERA_API HookPtr compress_hook(c10::ScalarType dtype);
TESSERA_API HookPtr fp16_compress_hook();
TESSERA_API HookPtr bf16_compress_hook();

/// Does not communicate: each rank keeps its own gradients. For measuring what communication costs.
TESSERA_API HookPtr noop_hook();

/// Sends eight bits per element: one scale and zero point per bucket. Every rank gathers the
/// others' bytes and averages in float32, so each receives (size - 1) / 4 of the bucket.
TESSERA_API HookPtr quantization_per_tensor_hook();
/// The same with one scale and zero point per `channel_size` elements.
TESSERA_API HookPtr quantization_per_channel_hook(std::int64_t channel_size = 512);

/// Sends eight bits per element, one scale per parameter, and adds what rounding lost to the next
/// step's gradient: over several steps nothing is lost. The losses are state, by parameter name.
TESSERA_API HookPtr int8_error_feedback_hook();

/// Casts each bucket to `dtype` before `inner` and its result back after.
TESSERA_API HookPtr compress_wrapper(HookPtr inner, c10::ScalarType dtype);
TESSERA_API HookPtr fp16_compress_wrapper(HookPtr inner);
TESSERA_API HookPtr bf16_compress_wrapper(HookPtr inner);

/// A hook of the user's own, as a function. See CommHook for what it may do.
TESSERA_API HookPtr custom_hook(std::string name, std::function<FuturePtr(Bucket&)> reduce);

}  // namespace tessera::data_parallel
