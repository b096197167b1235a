// lm/tokenizer.h — texts as numbers, by a tokenizer.json of Hugging Face. No LibTorch.
//
// Byte-pair encoding over bytes, as GPT-2, Llama 3 and Qwen have it: the text is cut into words by
// one of the patterns of these models, and the bytes of a word are joined pair by pair, the
// earliest pair of the list first. Special tokens are found in the text. Where the file asks for
// NFC, as Qwen's do, letters and marks are composed first.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::workloads::lm {

/// Immutable; safe to share between threads.
class Tokenizer {
 public:
  /// Throws DataError, naming the file and what it asks for, for one that cannot be read or is of
  /// another kind.
  static Tokenizer from_file(const std::string& path);
  /// The same from a text; `name` is named in what is thrown.
  static Tokenizer from_json(std::string_view text, const std::string& name);

  /// Without the tokens that a model's template adds before and after.
  std::vector<std::int32_t> encode(std::string_view text) const;
  /// The bytes of the tokens, of a text that was composed in that form; what is no token is left
  /// out.
  std::string decode(std::span<const std::int32_t> tokens) const;
  /// One more than the largest number.
  std::int64_t vocab_size() const noexcept;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace tessera::workloads::lm
