// data/numbers.h — numbers as people write them. No LibTorch.

#pragma once

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <system_error>

namespace tessera::workloads::data {

inline std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

inline constexpr double kPowersOfTen[] = {1e0, 1e1, 1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                          1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};

inline constexpr std::int64_t kEndlessPlace = std::int64_t{1} << 60;

/// What a number is that doubles cannot hold: 0 or infinity, by the place of its first digit.
inline double beyond_doubles(std::string_view text) {
  const bool is_negative = text.starts_with('-');
  if (is_negative) text.remove_prefix(1);
  std::int64_t place = 0;
  if (const std::size_t mark = text.find_first_of("eE"); mark != std::string_view::npos) {
    std::string_view digits = text.substr(mark + 1);
    if (digits.starts_with('+')) digits.remove_prefix(1);
    const char* end = digits.data() + digits.size();
    if (std::from_chars(digits.data(), end, place).ec != std::errc()) {
      place = digits.starts_with('-') ? -kEndlessPlace : kEndlessPlace;
    }
    place = std::clamp(place, -kEndlessPlace, kEndlessPlace);
    text = text.substr(0, mark);
  }
  place += static_cast<std::int64_t>(std::min(text.find('.'), text.size()));
  place -= static_cast<std::int64_t>(text.find_first_of("123456789"));
  const double size = place > 0 ? std::numeric_limits<double>::infinity() : 0;
  return is_negative ? -size : size;
}

/// The nearest double; false if the text is no number. Infinity and NaN are numbers here.
inline bool parse_real(std::string_view text, double& value) {
  // Up to 15 digits and a point, which are exact: a whole number over a power of ten.
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
      const double size = static_cast<double>(whole) / kPowersOfTen[behind < 0 ? 0 : behind];
      value = is_negative ? -size : size;
      return true;
    }
  }
  text = trimmed(text);
  if (text.starts_with('+')) text.remove_prefix(1);
  at = text.data();
  end = at + text.size();
  const auto [stop, error] = std::from_chars(at, end, value);
  if (error == std::errc::result_out_of_range && stop == end) {
    value = beyond_doubles(text);
    return true;
  }
  return error == std::errc() && stop == end && at != end;
}

template <typename Number>
bool parse_digits_of(std::string_view text, Number& value) {
  text = trimmed(text);
  if (const std::size_t point = text.find('.'); point != std::string_view::npos) {
    if (text.find_first_not_of('0', point + 1) != std::string_view::npos) return false;
    text = text.substr(0, point);
  }
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end && !text.empty();
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
  return parse_digits_of(text, value);
}

/// A whole number of 64 bits, signed or not: one from 2^63 on, as hashes may be, is the id with the
/// same bits.
inline bool parse_id(std::string_view text, std::int64_t& id) {
  if (parse_whole(text, id)) return true;
  std::uint64_t bits = 0;
  if (!parse_digits_of(text, bits)) return false;
  id = static_cast<std::int64_t>(bits);
  return true;
}

// The same of texts in a buffer with 8 bytes before and behind them that can be read: eight bytes
// at once, without a branch on their number.

/// Eight digits, the first in the lowest byte; false if one of them is none.
inline bool parse_digits(std::uint64_t word, std::uint64_t& value) {
  constexpr std::uint64_t kHigh = 0xf0f0f0f0f0f0f0f0U;
  const std::uint64_t next = word + 0x0606060606060606U;
  if (((word & kHigh) | ((next & kHigh) >> 4U)) != 0x3333333333333333U) return false;
  // Pairs of digits, then of pairs, then of fours.
  word = ((word & 0x0f0f0f0f0f0f0f0fU) * (1 + (10U << 8U))) >> 8U;
  word = ((word & 0x00ff00ff00ff00ffU) * (1 + (100U << 16U))) >> 16U;
  value = ((word & 0x0000ffff0000ffffU) * (1 + (std::uint64_t{10000} << 32U))) >> 32U;
  return true;
}

/// The last bytes of a text of 1 to 8, and '0' before them.
inline std::uint64_t last_bytes(const char* end, std::size_t size) {
  static_assert(std::endian::native == std::endian::little);
  std::uint64_t word = 0;
  std::memcpy(&word, end - 8, 8);
  const std::size_t bits = 8 * (8 - size);
  return (word >> bits << bits) | (0x3030303030303030U >> 1U >> (63 - bits));
}

inline bool parse_real_nearby(std::string_view text, double& value) {
  const bool is_negative = !text.empty() && text.front() == '-';
  const std::size_t size = text.size() - (is_negative ? 1 : 0);
  if (size - 1 >= 8) return parse_real(text, value);  // 0 too
  std::uint64_t word = last_bytes(text.data() + text.size(), size);
  std::size_t behind = 0;
  constexpr std::uint64_t kOnes = 0x0101010101010101U;
  const std::uint64_t unlike = word ^ (kOnes * '.');
  if (const std::uint64_t points = (unlike - kOnes) & ~unlike & (kOnes << 7U); points != 0) {
    if (size == 1) return false;
    // The point goes, what is before it moves up.
    const auto place = static_cast<unsigned>(std::countr_zero(points)) & ~7U;
    behind = 7 - place / 8;
    const std::uint64_t below = (std::uint64_t{1} << place) - 1;
    word = (word & ~(below << 8U | 0xffU)) | (word & below) << 8U | '0';
  }
  std::uint64_t whole = 0;
  if (!parse_digits(word, whole)) return parse_real(text, value);
  const double number = static_cast<double>(whole) / kPowersOfTen[behind];
  value = is_negative ? -number : number;
  return true;
}

inline bool parse_whole_nearby(std::string_view text, std::int64_t& value) {
  std::uint64_t whole = 0;
  if (text.size() - 1 >= 8 ||
      !parse_digits(last_bytes(text.data() + text.size(), text.size()), whole)) {
    return parse_whole(text, value);
  }
  value = static_cast<std::int64_t>(whole);
  return true;
}

}  // namespace tessera::workloads::data
