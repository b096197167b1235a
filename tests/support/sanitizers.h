// sanitizers.h — what a build with sanitizers cannot show; sanitizers.py for C++.

#pragma once

namespace tessera::testing {

/// Sanitizers keep memory beside the program's, take signals for themselves, and make times their
/// own.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kIsSanitized = true;
#else
inline constexpr bool kIsSanitized = false;
#endif

}  // namespace tessera::testing
