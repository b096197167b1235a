// tests/support/error_text.h — the text of the error that some work throws.

#pragma once

#include <string>

#include <c10/util/Exception.h>

namespace tessera::testing {

/// Empty if nothing is thrown.
template <typename Work>
std::string error_text(Work&& work) {
  try {
    work();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return {};
}

}  // namespace tessera::testing
