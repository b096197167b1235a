// tessera/core/error_file.h — the last words of a rank, where its launcher looks for them.
//
// The format is torchrun's (the file named by TORCHELASTIC_ERROR_FILE), with two additions in
// `extraInfo` that other launchers ignore: `timestamp_ns`, since whole seconds cannot tell a cause
// from its consequences, and `secondary`, set by a rank that only reports the failure of a peer.
// Needs neither LibTorch nor a JSON library.

#pragma once

#include <cstdint>
#include <string_view>

#include "tessera/core/export.h"

namespace tessera::core {

/// What a rank says before it ends.
struct ErrorReport {
  std::string_view message = {};    // `Type: text`
  std::string_view callstack = {};  // may be empty
  int64_t timestamp_ns = 0;         // nanoseconds since 1970; 0 means now
  bool is_secondary = false;        // the failure of a peer, reported by a survivor
};

/// Writes the report to `path`, whole or not at all; the first report wins. Returns whether this
/// call's report is the one on disk.
///
/// Async-signal-safe: allocates nothing, and may be called from a signal or terminate handler.
TESSERA_API bool write_error_file(const char* path, const ErrorReport& report) noexcept;

/// The same, to the file named by TORCHELASTIC_ERROR_FILE. Returns false if the variable is unset.
TESSERA_API bool write_error_file(const ErrorReport& report) noexcept;

}  // namespace tessera::core
