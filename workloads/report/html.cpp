#include "report/html.h"

#include <cmath>
#include <cstdio>

namespace tessera::workloads::report {
namespace {

template <class... Values>
std::string print(const char* format, Values... values) {
  char text[64];
  std::snprintf(text, sizeof(text), format, values...);
  return text;
}

// Three digits, whatever the size.
std::string three_digits(double value) {
  const double size = std::abs(value);
  return print(size >= 99.95 ? "%.0f" : size >= 9.995 ? "%.1f" : "%.2f", value);
}

}  // namespace

std::string escape(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      case '\'':
        result += "&#39;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

std::string escape_json(std::string_view json) {
  std::string result;
  for (const char c : json) {
    if (c == '<') {
      result += "\\u003c";
    } else {
      result += c;
    }
  }
  return result;
}

std::string number(double value) {
  return std::isfinite(value) ? print("%.6g", value) : std::string("–");
}

std::string short_number(double value) {
  if (!std::isfinite(value)) return "–";
  if (std::abs(value) >= 999.5e6) return three_digits(value / 1e9) + "G";
  if (std::abs(value) >= 999.5e3) return three_digits(value / 1e6) + "M";
  if (std::abs(value) >= 9995) return three_digits(value / 1e3) + "k";
  return value == std::floor(value) ? print("%.0f", value) : three_digits(value);
}

std::string bytes_text(double bytes) {
  if (bytes < 1000) return print("%.0f B", bytes);
  if (bytes < 999.5e3) return three_digits(bytes / 1e3) + " kB";
  if (bytes < 999.5e6) return three_digits(bytes / 1e6) + " MB";
  if (bytes < 999.5e9) return three_digits(bytes / 1e9) + " GB";
  return three_digits(bytes / 1e12) + " TB";
}

std::string seconds_text(double seconds) {
  if (!std::isfinite(seconds)) return "–";
  if (seconds < 0.9995e-3) return three_digits(seconds * 1e6) + " µs";
  if (seconds < 0.9995) return three_digits(seconds * 1e3) + " ms";
  if (seconds < 120) return three_digits(seconds) + " s";
  const auto whole = static_cast<long>(std::lround(seconds));
  if (whole < 7200) return print("%ld min %ld s", whole / 60, whole % 60);
  return print("%ld h %ld min", whole / 3600, whole / 60 % 60);
}

}  // namespace tessera::workloads::report
