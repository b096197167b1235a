// tessera/comm/failure.h — an error of one rank, told to all.
//
// A rank that dies is noticed by the others by itself. A rank that lives on after an exception has
// to say so, or its peers wait for it until their limit: run the training loop inside `guarded`.

#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "tessera/comm/error.h"
#include "tessera/core/export.h"

namespace tessera::comm {

/// Tells every group this process belongs to that it failed. Peers that wait, or will wait, raise
/// Error(kPeerFailed) with this rank's number and `reason`; the process's own groups are unusable
/// afterwards. An error that came from a peer is passed on unchanged, so the root cause survives.
/// Not collective, never blocks, any thread.
TESSERA_API void report_failure(const std::string& reason) noexcept;
/// As above, with the exception's text.
TESSERA_API void report_failure(std::exception_ptr exception) noexcept;

/// Runs `work`; if it throws, reports the failure to the other ranks and throws on.
template <class Work>
decltype(auto) guarded(Work&& work) {
  try {
    return std::forward<Work>(work)();
  } catch (...) {
    report_failure(std::current_exception());
    throw;
  }
}

/// The last Error that an operation of a group of this process ended with, if any. For callers that
/// got its text through an interface that loses kind and ranks, as torch.distributed does. Any
/// thread.
TESSERA_API std::optional<Error> last_error();

/// The training step this process is at, for error messages. Not collective.
TESSERA_API void set_step(std::int64_t step) noexcept;

/// Arranges that an uncaught exception is reported to the peers, written to the launcher's error
/// file (TORCHELASTIC_ERROR_FILE) and printed, before the process ends: for an Error with code 69
/// if the ranks did not find each other, 78 if the engine cannot be had, 75 otherwise (a peer was
/// lost, the limit passed, the ranks disagree); for other exceptions by abort(). comm::init calls
/// this. Not collective.
TESSERA_API void install_failure_handler();

/// Writes the launcher's error file for `exception`, if there is a launcher and no earlier file.
TESSERA_API void write_error_file(std::exception_ptr exception) noexcept;

}  // namespace tessera::comm
