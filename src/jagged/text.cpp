#include "jagged/text.h"

#include <array>
#include <charconv>

namespace tessera::jagged::detail {
namespace {

// The shortest digits that read back as the same number; a floating point number shows that it is
// one.
template <typename T>
void append_number(std::string& text, T number) {
  std::array<char, 64> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  const std::string_view word(digits.data(), static_cast<std::size_t>(end - digits.data()));
  text.append(word);
  if (std::is_floating_point_v<T> && word.find_first_of(".einf") == std::string_view::npos) {
    text.append(".0");
  }
}

void append_value(std::string& text, const at::Tensor& value) {
  if (value.dim() > 0) {
    text.append("[");
    for (std::int64_t i = 0; i < value.size(0); ++i) {
      if (i > 0) text.append(", ");
      append_value(text, value[i]);
    }
    text.append("]");
  } else if (value.scalar_type() == at::kDouble) {
    append_number(text, value.item<double>());
  } else if (value.is_floating_point()) {
    append_number(text, value.item<float>());
  } else {
    append_number(text, value.item<std::int64_t>());
  }
}

}  // namespace

std::string rows_text(const at::Tensor& values, std::int64_t begin, std::int64_t end) {
  std::string text;
  append_value(text, values.slice(0, begin, end));
  return text;
}

std::string bags_text(const at::Tensor& values, const at::Tensor& offsets, std::int64_t begin,
                      std::int64_t end) {
  const auto* at = offsets.const_data_ptr<std::int64_t>();
  std::string text = "[";
  for (std::int64_t bag = begin; bag < end; ++bag) {
    if (bag > begin) text.append(", ");
    text.append(rows_text(values, at[bag], at[bag + 1]));
  }
  return text.append("]");
}

}  // namespace tessera::jagged::detail
