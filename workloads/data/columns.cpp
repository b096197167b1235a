#include "data/columns.h"

#include <charconv>
#include <cmath>

namespace tessera::workloads::data {
namespace {

// Digits as few as tell the number from its neighbours, with an exponent only where it is below
// -4 or above 15, and ".0" behind a whole number.
template <class Real>
std::string shortest(Real value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  const char* end =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific).ptr;
  const std::string_view all(buffer, static_cast<std::size_t>(end - buffer));
  const std::size_t e = all.find('e');
  int exponent = 0;
  const std::size_t number = all[e + 1] == '+' ? e + 2 : e + 1;
  std::from_chars(all.data() + number, end, exponent);
  if (exponent < -4 || exponent >= 16) return std::string(all);
  char fixed[64];
  end = std::to_chars(fixed, fixed + sizeof(fixed), value, std::chars_format::fixed).ptr;
  std::string text(fixed, static_cast<std::size_t>(end - fixed));
  if (text.find('.') == std::string::npos) text += ".0";
  return text;
}

}  // namespace

std::string text_of_real(double value) { return shortest(value); }
std::string text_of_real(float value) { return shortest(value); }

std::string_view Column::text(std::int64_t row, std::string& memory) const {
  const auto place = static_cast<std::size_t>(row);
  switch (kind) {
    case Kind::kText:
      return text_at(row);
    case Kind::kBool:
      return wholes[place] != 0 ? "True" : "False";
    case Kind::kWhole: {
      char buffer[24];
      memory.assign(buffer, std::to_chars(buffer, buffer + sizeof(buffer), wholes[place]).ptr);
      return memory;
    }
    case Kind::kReal32:
      return memory = text_of_real(reals32[place]);
    case Kind::kReal64:
      return memory = text_of_real(reals64[place]);
    default:
      return {};
  }
}

std::unique_ptr<ColumnSource> open_columns(const std::string& path, FileKind kind) {
  return kind == FileKind::kParquet ? open_parquet(path) : open_npz(path);
}

}  // namespace tessera::workloads::data
