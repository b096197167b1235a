// lm/word_pattern.h — how a text is cut into words before its bytes are joined. No LibTorch.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera::workloads::lm {

/// GPT-2's pattern, and that of GPT-4 with numbers of at most three digits (Llama 3) or one (Qwen).
enum class WordPattern : std::uint8_t { kGpt2, kThreeDigits, kOneDigit };

/// The pattern that a regular expression of a tokenizer.json stands for; false for another one.
bool find_pattern(std::string_view expression, WordPattern& pattern);

/// How many bytes the first word of `text` has, which is not empty. Bytes that are no UTF-8 count
/// as signs.
std::size_t first_word(std::string_view text, WordPattern pattern);

}  // namespace tessera::workloads::lm
