// workloads/lm/text_source.h — bytes of a text, cut into sequences.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

namespace tessera::workloads {

/// The text this library was built from: its own sources. What `train lm` reads by default.
std::string_view own_source_text();

/// A text whose tokens are its bytes: 256 ids. Immutable; safe to share between threads.
class TextSource {
 public:
  static constexpr std::int64_t kVocabSize = 256;

  /// Reads a file whole. Throws ValueError naming it if it cannot be read.
  static TextSource from_file(const std::string& path);
  explicit TextSource(std::string_view text);

  std::int64_t size() const noexcept { return tokens_.numel(); }

  /// Returns int64 [count, length + 1]: sequences [first, first + count) of the batch of `step`.
  /// The places are a function of the seed, the step and the index of the sequence alone, so that
  /// any split of a batch over ranks reads the same text. Throws ValueError if the text is shorter.
  at::Tensor sequences(std::uint64_t seed, std::int64_t step, std::int64_t first,
                       std::int64_t count, std::int64_t length) const;

 private:
  at::Tensor tokens_;  // uint8
};

}  // namespace tessera::workloads
