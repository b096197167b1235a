// workloads/lm/text_source.h — tokens of a text, cut into sequences.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "lm/tokenizer.h"

namespace tessera::workloads {

/// The text this library was built from: its own sources. What `train lm` reads by default.
std::string_view own_source_text();

/// A text as tokens: its bytes, 256 ids, or those of a tokenizer. Immutable; safe to share between
/// threads.
class TextSource {
 public:
  static constexpr std::int64_t kVocabSize = 256;

  /// Reads a file whole. Throws ValueError naming it if it cannot be read.
  static TextSource from_file(const std::string& path, const lm::Tokenizer* tokenizer = nullptr);
  explicit TextSource(std::string_view text, const lm::Tokenizer* tokenizer = nullptr);

  std::int64_t size() const noexcept { return tokens_.numel(); }

  /// The tokens [begin, end), as a text of their own that shares their memory.
  TextSource part(std::int64_t begin, std::int64_t end) const;

  /// Returns int64 [count, length + 1]: sequences [first, first + count) of the batch of `step`.
  /// The places are a function of the seed, the step and the index of the sequence alone, so that
  /// any split of a batch over ranks reads the same text. Throws ValueError if the text is shorter.
  at::Tensor sequences(std::uint64_t seed, std::int64_t step, std::int64_t first,
                       std::int64_t count, std::int64_t length) const;

  /// How many pieces of `length` tokens, with one more behind them, lie one after the other in it.
  /// Throws ValueError if there is none.
  std::int64_t num_pieces(std::int64_t length) const;
  /// Returns int64 [number of pieces, length + 1]: piece i begins at token i * length.
  at::Tensor pieces(std::span<const std::int64_t> numbers, std::int64_t length) const;

 private:
  explicit TextSource(at::Tensor tokens) : tokens_(std::move(tokens)) {}
  void check_holds(std::int64_t length) const;

  at::Tensor tokens_;  // uint8, or int32 of a tokenizer
};

}  // namespace tessera::workloads
