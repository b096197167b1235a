// tessera/core/check.h — checks that say what is wrong, by kind of fault.
//
// The caller is wrong: TESSERA_CHECK_VALUE, _TYPE, _INDEX; Python sees ValueError, TypeError and
// IndexError. The world is wrong (a peer is gone, a limit has passed): comm::Error, see
// tessera/comm/error.h. We are wrong: TESSERA_INTERNAL_ASSERT.
//
// Messages read "operation: what is wrong, with the numbers. What to do."

#pragma once

#include <c10/util/Exception.h>

#define TESSERA_CHECK_VALUE(condition, ...) TORCH_CHECK_VALUE(condition, __VA_ARGS__)
#define TESSERA_CHECK_TYPE(condition, ...) TORCH_CHECK_TYPE(condition, __VA_ARGS__)
#define TESSERA_CHECK_INDEX(condition, ...) TORCH_CHECK_INDEX(condition, __VA_ARGS__)

/// States an invariant of Tessera itself, in words.
#define TESSERA_INTERNAL_ASSERT(condition, ...)           \
  TORCH_CHECK(condition, "internal error: ", __VA_ARGS__, \
              ". This is a defect of Tessera; report it together with this text.")
