// data/numbers.h — numbers as people write them. No LibTorch.

#pragma once

#include <charconv>
#include <cstdint>
#include <string_view>

namespace tessera::workloads::data {

inline std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

/// The nearest double; false if the text is no number. Infinity and NaN are numbers here.
inline bool parse_real(std::string_view text, double& value) {
  // Up to 15 digits and a point, which are exact: a whole number over a power of ten.
  static constexpr double kPowers[] = {1e0, 1e1, 1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                       1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};
  const char* at = text.data();
  const char* end = at + text.size();
  const bool is_negative = at < end && *at == '-';
  const char* digits = at + (is_negative ? 1 : 0);
  if (end - digits <= 16) {
    std::uint64_t whole = 0;
    int num_digits = 0;
    int behind = -1;  // digits behind the point
    const char* place = digits;
    for (; place < end; ++place) {
      const unsigned digit = static_cast<unsigned char>(*place) - unsigned{'0'};
      if (digit <= 9) {
        whole = whole * 10 + digit;
        ++num_digits;
        behind += behind >= 0 ? 1 : 0;
      } else if (*place == '.' && behind < 0) {
        behind = 0;
      } else {
        break;
      }
    }
    if (place == end && num_digits > 0 && num_digits <= 15) {
      const double size = static_cast<double>(whole) / kPowers[behind < 0 ? 0 : behind];
      value = is_negative ? -size : size;
      return true;
    }
  }
  text = trimmed(text);
  if (text.starts_with('+')) text.remove_prefix(1);
  at = text.data();
  end = at + text.size();
  const auto [stop, error] = std::from_chars(at, end, value);
  return error == std::errc() && stop == end && at != end;
}

/// A whole number; "3.0", as programs write that keep ids as floating point, counts as 3.
inline bool parse_whole(std::string_view text, std::int64_t& value) {
  if (!text.empty() && text.size() <= 18) {
    std::uint64_t digits = 0;
    bool is_plain = true;
    for (const char c : text) {
      const unsigned digit = static_cast<unsigned char>(c) - unsigned{'0'};
      is_plain = is_plain && digit <= 9;
      digits = digits * 10 + digit;
    }
    if (is_plain) {
      value = static_cast<std::int64_t>(digits);
      return true;
    }
  }
  text = trimmed(text);
  if (const std::size_t point = text.find('.'); point != std::string_view::npos) {
    if (text.find_first_not_of('0', point + 1) != std::string_view::npos) return false;
    text = text.substr(0, point);
  }
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end && !text.empty();
}

}  // namespace tessera::workloads::data
