#include "lm/word_pattern.h"

#include <algorithm>

#include "lm/unicode_classes.h"

namespace tessera::workloads::lm {
namespace {

constexpr std::string_view kGpt2Expression =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kThreeDigitsExpression =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kOneDigitExpression =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

enum class Class : std::uint8_t { kEnd, kLetter, kNumber, kSpace, kSign };

struct Character {
  Class kind = Class::kEnd;
  std::size_t size = 0;  // bytes
  char byte = 0;         // if it is one
};

bool is_in(std::span<const CodePoints> ranges, std::uint32_t point) {
  const auto after = std::upper_bound(
      ranges.begin(), ranges.end(), point,
      [](std::uint32_t value, const CodePoints& range) { return value < range.first; });
  return after != ranges.begin() && point <= (after - 1)->last;
}

bool is_space(std::uint32_t point) {
  return (point >= 9 && point <= 13) || point == 0x20 || point == 0x85 || point == 0xa0 ||
         point == 0x1680 || (point >= 0x2000 && point <= 0x200a) || point == 0x2028 ||
         point == 0x2029 || point == 0x202f || point == 0x205f || point == 0x3000;
}

Class class_of(std::uint32_t point) {
  if (point < 0x80) {
    if ((point | 0x20U) >= 'a' && (point | 0x20U) <= 'z') return Class::kLetter;
    if (point >= '0' && point <= '9') return Class::kNumber;
    return is_space(point) ? Class::kSpace : Class::kSign;
  }
  if (is_in(letters(), point)) return Class::kLetter;
  if (is_in(numbers(), point)) return Class::kNumber;
  return is_space(point) ? Class::kSpace : Class::kSign;
}

Character character_at(std::string_view text, std::size_t place) {
  if (place >= text.size()) return {};
  const auto lead = static_cast<unsigned char>(text[place]);
  if (lead < 0x80) return {class_of(lead), 1, text[place]};
  const std::size_t size = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  std::uint32_t point = lead & (0x7fU >> size);
  if (lead < 0xc2 || lead > 0xf4 || place + size > text.size()) return {Class::kSign, 1, '\0'};
  for (std::size_t i = 1; i < size; ++i) {
    const auto next = static_cast<unsigned char>(text[place + i]);
    if ((next & 0xc0U) != 0x80) return {Class::kSign, 1, '\0'};
    point = point << 6U | (next & 0x3fU);
  }
  return {class_of(point), size, '\0'};
}

// Past the characters of this class that follow.
std::size_t past(std::string_view text, std::size_t place, Class kind) {
  for (;;) {
    const Character one = character_at(text, place);
    if (one.kind != kind) return place;
    place += one.size;
  }
}

// 's, 't, 're, 've, 'm, 'll, 'd; 0 for none.
std::size_t ending(std::string_view text, bool any_case) {
  if (text.size() < 2 || text[0] != '\'') return 0;
  const auto letter = [&](std::size_t place) -> char {
    if (place >= text.size()) return 0;
    const char c = text[place];
    return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  };
  const char first = letter(1);
  const char second = letter(2);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
  if ((first == 'r' || first == 'v') && second == 'e') return 3;
  return first == 'l' && second == 'l' ? 3 : 0;
}

// Spaces before a word belong to it but for the last one, which the word takes itself.
std::size_t spaces(std::string_view text) {
  std::size_t last = 0;
  std::size_t end = 0;
  for (Character one = character_at(text, 0); one.kind == Class::kSpace;
       one = character_at(text, end)) {
    last = end;
    end += one.size;
  }
  return end == text.size() || last == 0 ? end : last;
}

// A run of characters of this class, with a space before them or without.
std::size_t run_with_space(std::string_view text, Class kind) {
  const std::size_t begin = text[0] == ' ' ? 1 : 0;
  const std::size_t end = past(text, begin, kind);
  return end > begin ? end : 0;
}

bool is_end_of_line(char c) { return c == '\n' || c == '\r'; }

std::size_t gpt2_word(std::string_view text) {
  if (const std::size_t size = ending(text, /*any_case=*/false)) return size;
  for (const Class kind : {Class::kLetter, Class::kNumber, Class::kSign}) {
    if (const std::size_t size = run_with_space(text, kind)) return size;
  }
  return spaces(text);
}

std::size_t gpt4_word(std::string_view text, int most_digits) {
  if (const std::size_t size = ending(text, /*any_case=*/true)) return size;
  const Character first = character_at(text, 0);
  const bool may_lead =
      (first.kind == Class::kSign || first.kind == Class::kSpace) && !is_end_of_line(first.byte);
  const std::size_t begin = may_lead ? first.size : 0;
  if (const std::size_t end = past(text, begin, Class::kLetter); end > begin) return end;
  if (first.kind == Class::kNumber) {
    std::size_t end = 0;
    for (int i = 0; i < most_digits; ++i) {
      const Character one = character_at(text, end);
      if (one.kind != Class::kNumber) break;
      end += one.size;
    }
    return end;
  }
  if (std::size_t end = run_with_space(text, Class::kSign)) {
    while (end < text.size() && is_end_of_line(text[end])) ++end;
    return end;
  }
  // Up to the last end of line of the spaces here.
  const std::size_t end = past(text, 0, Class::kSpace);
  const std::size_t line = text.substr(0, end).find_last_of("\r\n");
  return line != std::string_view::npos ? line + 1 : spaces(text);
}

}  // namespace

bool find_pattern(std::string_view expression, WordPattern& pattern) {
  if (expression == kGpt2Expression) {
    pattern = WordPattern::kGpt2;
  } else if (expression == kThreeDigitsExpression) {
    pattern = WordPattern::kThreeDigits;
  } else if (expression == kOneDigitExpression) {
    pattern = WordPattern::kOneDigit;
  } else {
    return false;
  }
  return true;
}

std::size_t first_word(std::string_view text, WordPattern pattern) {
  if (pattern == WordPattern::kGpt2) return gpt2_word(text);
  return gpt4_word(text, pattern == WordPattern::kThreeDigits ? 3 : 1);
}

}  // namespace tessera::workloads::lm
