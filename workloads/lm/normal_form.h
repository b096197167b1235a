// lm/normal_form.h — texts in Unicode's composed normal form (NFC). No LibTorch.

#pragma once

#include <string>
#include <string_view>

namespace tessera::workloads::lm {

/// The text with every letter and its marks as one character where there is one, and marks in their
/// one order: UAX #15's NFC, of the characters that Python's `unicodedata` knew when the library
/// was built. Bytes that are no UTF-8 stay as they are.
std::string composed(std::string_view text);

}  // namespace tessera::workloads::lm
