#include "serving/json_reader.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <type_traits>

namespace tessera::serving {
namespace {

constexpr std::size_t kMostString = std::size_t{1} << 16;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

int hex_digit(char c) {
  if (is_digit(c)) return c - '0';
  const char lower = static_cast<char>(c | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

void append_utf8(std::string& text, std::uint32_t code) {
  const auto put = [&](std::uint32_t byte) { text += static_cast<char>(byte); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6);
    put(0x80 | (code & 63));
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    put(0x80 | (code >> 6 & 63));
    put(0x80 | (code & 63));
  } else {
    put(0xF0 | code >> 18);
    put(0x80 | (code >> 12 & 63));
    put(0x80 | (code >> 6 & 63));
    put(0x80 | (code & 63));
  }
}

}  // namespace

void JsonReader::fail(const std::string& what) const { throw JsonError(what, place_); }

void JsonReader::skip_space() {
  while (place_ < text_.size()) {
    const char c = text_[place_];
    if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return;
    ++place_;
  }
}

bool JsonReader::take(char c) {
  skip_space();
  if (place_ >= text_.size() || text_[place_] != c) return false;
  ++place_;
  return true;
}

void JsonReader::expect(char c) {
  if (take(c)) return;
  const bool is_end = place_ >= text_.size();
  fail(std::string("expected '") + c + (is_end ? "', the text ends" : "'"));
}

std::string JsonReader::string() {
  expect('"');
  std::string value;
  const auto code_unit = [&]() {
    std::uint32_t unit = 0;
    for (int i = 0; i < 4; ++i) {
      const int digit = place_ < text_.size() ? hex_digit(text_[place_]) : -1;
      if (digit < 0) fail("an escape of a string is not four hexadecimal digits");
      unit = unit * 16 + static_cast<std::uint32_t>(digit);
      ++place_;
    }
    return unit;
  };
  while (true) {
    if (place_ >= text_.size()) fail("a string has no end");
    if (value.size() > kMostString) fail("a string is longer than 64 KiB");
    const char c = text_[place_++];
    if (c == '"') return value;
    if (static_cast<unsigned char>(c) < 0x20) fail("a string has a control character");
    if (c != '\\') {
      value += c;
      continue;
    }
    if (place_ >= text_.size()) fail("a string has no end");
    const char escape = text_[place_++];
    constexpr std::string_view kEscapes = "\"\\/bfnrt";
    constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
    const std::size_t known = kEscapes.find(escape);
    if (known != std::string_view::npos) {
      value += kMeanings[known];
    } else if (escape == 'u') {
      std::uint32_t unit = code_unit();
      if (unit >= 0xDC00 && unit < 0xE000) fail("a string has half of a surrogate pair");
      if (unit >= 0xD800 && unit < 0xDC00) {
        if (text_.substr(place_, 2) != "\\u") fail("a string has half of a surrogate pair");
        place_ += 2;
        const std::uint32_t low = code_unit();
        if (low < 0xDC00 || low >= 0xE000) fail("a string has half of a surrogate pair");
        unit = 0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00);
      }
      append_utf8(value, unit);
    } else {
      fail("a string has an unknown escape");
    }
  }
}

bool JsonReader::boolean() {
  skip_space();
  for (const bool value : {true, false}) {
    const std::string_view word = value ? "true" : "false";
    if (text_.substr(place_, word.size()) == word) {
      place_ += word.size();
      return value;
    }
  }
  fail("expected true or false");
}

// -?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?
std::string_view JsonReader::number_text() {
  skip_space();
  const std::size_t begin = place_;
  const auto here = [&] { return place_ < text_.size() ? text_[place_] : '\0'; };
  const auto digits = [&] {
    if (!is_digit(here())) fail("expected a number");
    while (is_digit(here())) ++place_;
  };
  if (here() == '-') ++place_;
  if (here() == '0') {
    ++place_;
    if (is_digit(here())) fail("a number begins with 0");
  } else {
    digits();
  }
  if (here() == '.') {
    ++place_;
    digits();
  }
  if (here() == 'e' || here() == 'E') {
    ++place_;
    if (here() == '+' || here() == '-') ++place_;
    digits();
  }
  return text_.substr(begin, place_ - begin);
}

template <typename Number, bool kUnsignedToo>
Number JsonReader::number(std::size_t index) {
  const std::string_view text = number_text();
  Number value{};
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec == std::errc::result_out_of_range) {
    // Too small for the type is 0, which is as near as it gets; too large is an error.
    if constexpr (std::is_floating_point_v<Number>) {
      double wide = 0;
      const auto again = std::from_chars(text.data(), end, wide);
      if (again.ec == std::errc() && std::abs(wide) < 1) return static_cast<Number>(wide);
      const std::size_t exponent = text.find_first_of("eE");
      if (exponent != std::string_view::npos && text.substr(exponent + 1, 1) == "-") return 0;
    }
    if constexpr (kUnsignedToo) {
      std::uint64_t bits = 0;
      const auto again = std::from_chars(text.data(), end, bits);
      if (again.ec == std::errc() && again.ptr == end) return static_cast<Number>(bits);
    }
    throw NumberError("number " + std::string(text.substr(0, 40)) + " is too large", index);
  }
  if (result.ec != std::errc() || result.ptr != end) {
    throw NumberError("number " + std::string(text.substr(0, 40)) + " is not whole", index);
  }
  return value;
}

std::int64_t JsonReader::integer() {
  const std::size_t begin = place_;
  try {
    return number<std::int64_t>(0);
  } catch (const NumberError& error) {
    throw JsonError(error.what(), begin);
  }
}

void JsonReader::skip(int levels) {
  if (levels == 0) fail("is nested too deeply");
  skip_space();
  switch (place_ < text_.size() ? text_[place_] : '\0') {
    case '{':
      return object([&](const std::string&) { skip(levels - 1); });
    case '[':
      return array([&](std::size_t) { skip(levels - 1); });
    case '"':
      string();
      return;
    case 't':
    case 'f':
      boolean();
      return;
    case 'n':
      if (text_.substr(place_, 4) != "null") fail("expected a value");
      place_ += 4;
      return;
    default:
      number_text();
  }
}

void JsonReader::finish() {
  skip_space();
  if (place_ != text_.size()) fail("something follows the end");
}

template <bool kUnsignedToo, typename Number>
void JsonReader::read_flat(std::vector<Number>& to, std::size_t most) {
  array([&](std::size_t) {
    if (to.size() == most) {
      throw NumberError("there are more numbers than the shape says", to.size());
    }
    to.push_back(number<Number, kUnsignedToo>(to.size()));
  });
}

template <typename Number>
void JsonReader::read_numbers(std::vector<Number>& to, std::size_t most, std::size_t inner) {
  // Each takes two bytes at least: a shape cannot ask for more memory than the body has paid for.
  to.reserve(to.size() + std::min(most, (text_.size() - place_) / 2 + 1));
  const std::size_t begin = place_;
  expect('[');
  const bool is_nested = take('[');
  place_ = begin;
  if (!is_nested || inner == 0) return read_flat(to, most);
  array([&](std::size_t row) {
    const std::size_t before = to.size();
    read_flat(to, std::min(most, before + inner));
    if (to.size() != before + inner) {
      throw NumberError("row " + std::to_string(row) + " has " +
                            std::to_string(to.size() - before) + " numbers, not " +
                            std::to_string(inner),
                        to.size());
    }
  });
}

void JsonReader::numbers(std::vector<float>& to, std::size_t most, std::size_t inner) {
  read_numbers(to, most, inner);
}
void JsonReader::numbers(std::vector<std::int64_t>& to, std::size_t most, std::size_t inner) {
  read_numbers(to, most, inner);
}
void JsonReader::numbers(std::vector<std::int32_t>& to, std::size_t most, std::size_t inner) {
  read_numbers(to, most, inner);
}

void JsonReader::ids(std::vector<std::int64_t>& to, std::size_t most) {
  to.reserve(to.size() + std::min(most, (text_.size() - place_) / 2 + 1));
  read_flat<true>(to, most);
}

}  // namespace tessera::serving
