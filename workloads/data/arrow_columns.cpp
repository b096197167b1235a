// Arrays of Arrow's C data interface as columns.

#include <cstring>
#include <limits>

#include "data/arrow_abi.h"
#include "data/columns.h"
#include "dlrm/half.h"

namespace tessera::workloads::data {
namespace {

using Kind = Column::Kind;

bool is_set(const void* bits, std::int64_t place) {
  return (static_cast<const std::uint8_t*>(bits)[place / 8] >> (place % 8) & 1) != 0;
}

[[noreturn]] void fail(const ArrowSchema& schema, const std::string& what) {
  throw DataError("column '" + std::string(schema.name != nullptr ? schema.name : "") + "' " +
                  what + ".");
}

// What cannot be a number, a text or a list of them.
std::string words_of(std::string_view format) {
  if (format.starts_with("ts")) return "a timestamp";
  if (format.starts_with("td")) return "a date";
  if (format.starts_with("tt")) return "a time of day";
  if (format.starts_with("tD") || format.starts_with("ti")) return "a duration";
  if (format.starts_with("d:")) return "a decimal number";
  if (format == "+s") return "a structure of several values";
  if (format == "+m") return "a map";
  if (format.starts_with("+u")) return "a union";
  return "of Arrow's type '" + std::string(format) + "'";
}

float real_of(std::uint16_t half) {
  if ((half & 0x7c00U) != 0x7c00U) return dlrm::float_of(half);
  if ((half & 0x3ffU) != 0) return std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  return (half & 0x8000U) != 0 ? -infinity : infinity;
}

class Importer {
 public:
  Importer(const ArrowSchema& schema, const ArrowArray& array, std::shared_ptr<const void> memory,
           KnownDictionary* known)
      : schema_(schema), array_(array), format_(schema.format), known_(known) {
    column_.num_rows = array.length;
    column_.memory = std::move(memory);
    if (array.length < 0 || array.offset < 0) fail(schema, "has a length below 0");
  }

  Column take() {
    find_nulls();
    if (schema_.dictionary != nullptr) {
      from_dictionary();
    } else if (!take_numbers() && !take_texts() && !take_lists()) {
      if (format_ == "n") {
        column_.kind = Kind::kNothing;
      } else {
        column_.kind = Kind::kOther;
        column_.type = words_of(format_);
      }
    }
    return std::move(column_);
  }

 private:
  std::size_t size() const { return static_cast<std::size_t>(array_.length); }

  const void* buffer(std::int64_t number) const {
    if (number >= array_.n_buffers) fail(schema_, "has too few buffers");
    const void* found = array_.buffers[number];
    if (found == nullptr && array_.length > 0 && number > 0) fail(schema_, "has no values");
    return found;
  }
  template <class T>
  const T* values(std::int64_t number) const {
    const auto* first = static_cast<const T*>(buffer(number));
    return first == nullptr ? nullptr : first + array_.offset;
  }

  void find_nulls() {
    if (array_.null_count == 0 || array_.n_buffers == 0 || format_ == "n") return;
    const void* bits = array_.buffers[0];
    if (bits == nullptr) return;
    column_.is_null.resize(size());
    bool has_null = false;
    for (std::size_t i = 0; i < size(); ++i) {
      const bool is_there = is_set(bits, array_.offset + static_cast<std::int64_t>(i));
      column_.is_null[i] = is_there ? 0 : 1;
      has_null = has_null || !is_there;
    }
    if (!has_null) column_.is_null.clear();
  }

  template <class T>
  void widen() {
    const T* from = values<T>(1);
    column_.kind = Kind::kWhole;
    column_.own_wholes.assign(from, from + (from == nullptr ? 0 : size()));
    column_.wholes = column_.own_wholes.data();
  }

  bool take_numbers() {
    if (format_.size() != 1) return false;
    switch (format_[0]) {
      case 'b': {
        column_.kind = Kind::kBool;
        column_.own_wholes.resize(size());
        const void* bits = buffer(1);
        for (std::size_t i = 0; i < size(); ++i) {
          column_.own_wholes[i] =
              is_set(bits, array_.offset + static_cast<std::int64_t>(i)) ? 1 : 0;
        }
        column_.wholes = column_.own_wholes.data();
        return true;
      }
      case 'c':
        return widen<std::int8_t>(), true;
      case 'C':
        return widen<std::uint8_t>(), true;
      case 's':
        return widen<std::int16_t>(), true;
      case 'S':
        return widen<std::uint16_t>(), true;
      case 'i':
        return widen<std::int32_t>(), true;
      case 'I':
        return widen<std::uint32_t>(), true;
      case 'l':
        column_.kind = Kind::kWhole;
        column_.wholes = values<std::int64_t>(1);
        return true;
      case 'L':
        take_unsigned();
        return true;
      case 'e': {
        const auto* halves = values<std::uint16_t>(1);
        const auto reals = std::make_shared<std::vector<float>>(size());
        for (std::size_t i = 0; i < size(); ++i) (*reals)[i] = real_of(halves[i]);
        column_.kind = Kind::kReal32;
        column_.reals32 = reals->data();
        column_.memory = reals;
        return true;
      }
      case 'f':
        column_.kind = Kind::kReal32;
        column_.reals32 = values<float>(1);
        return true;
      case 'g':
        column_.kind = Kind::kReal64;
        column_.reals64 = values<double>(1);
        return true;
      default:
        return false;
    }
  }

  // Numbers from 2^63 on, such as hashes, are texts of their digits, of which those who want bits
  // make bits.
  void take_unsigned() {
    const auto* from = values<std::uint64_t>(1);
    constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    bool fits = true;
    for (std::size_t i = 0; i < size(); ++i) {
      const bool is_there = column_.is_null.empty() || column_.is_null[i] == 0;
      fits = fits && (from[i] <= kMost || !is_there);
    }
    if (fits) {
      column_.kind = Kind::kWhole;
      column_.wholes = reinterpret_cast<const std::int64_t*>(from);
      return;
    }
    const auto digits = std::make_shared<std::vector<std::string>>();
    digits->reserve(size());
    for (std::size_t i = 0; i < size(); ++i) digits->push_back(std::to_string(from[i]));
    column_.kind = Kind::kText;
    column_.texts.assign(digits->begin(), digits->end());
    column_.memory = digits;
  }

  template <class Offset>
  void cut_texts() {
    const auto* offsets = values<Offset>(1);
    if (size() == 0) return;
    const auto* bytes =
        static_cast<const char*>(array_.n_buffers > 2 ? array_.buffers[2] : nullptr);
    for (std::size_t i = 0; i < size(); ++i) {
      if (offsets[i] < 0 || offsets[i + 1] < offsets[i]) fail(schema_, "has offsets that go back");
      column_.texts[i] = {bytes + offsets[i],
                          static_cast<std::size_t>(offsets[i + 1] - offsets[i])};
    }
  }

  bool take_texts() {
    const bool is_fixed = format_.starts_with("w:");
    if (format_ != "u" && format_ != "U" && format_ != "z" && format_ != "Z" && !is_fixed) {
      return false;
    }
    column_.kind = Kind::kText;
    column_.texts.resize(size());
    if (is_fixed) {
      const auto width = static_cast<std::size_t>(std::stoll(std::string(format_.substr(2))));
      const auto* bytes = static_cast<const char*>(buffer(1));
      for (std::size_t i = 0; i < size(); ++i) {
        column_.texts[i] = {bytes + (static_cast<std::size_t>(array_.offset) + i) * width, width};
      }
    } else if (format_ == "u" || format_ == "z") {
      cut_texts<std::int32_t>();
    } else {
      cut_texts<std::int64_t>();
    }
    return true;
  }

  template <class Offset>
  void cut_lists() {
    const auto* offsets = values<Offset>(1);
    for (std::size_t i = 0; i <= size() && offsets != nullptr; ++i) column_.begins[i] = offsets[i];
  }

  bool take_lists() {
    const bool is_fixed = format_.starts_with("+w:");
    if (format_ != "+l" && format_ != "+L" && !is_fixed) return false;
    if (schema_.n_children != 1 || array_.n_children != 1) fail(schema_, "is a list without items");
    column_.kind = Kind::kList;
    column_.begins.assign(size() + 1, 0);
    if (is_fixed) {
      const std::int64_t width = std::stoll(std::string(format_.substr(3)));
      for (std::size_t i = 0; i <= size(); ++i) {
        column_.begins[i] = (array_.offset + static_cast<std::int64_t>(i)) * width;
      }
    } else if (format_ == "+l") {
      cut_lists<std::int32_t>();
    } else {
      cut_lists<std::int64_t>();
    }
    Column items = column_of(*schema_.children[0], *array_.children[0], column_.memory);
    for (std::size_t i = 0; i < size(); ++i) {
      if (column_.begins[i] < 0 || column_.begins[i + 1] < column_.begins[i] ||
          column_.begins[i + 1] > items.num_rows) {
        fail(schema_, "has lists that reach past their items");
      }
    }
    if (items.kind == Kind::kOther || items.kind == Kind::kList) {
      column_.type = "a list of lists, or of what is neither number nor text";
      column_.kind = Kind::kOther;
    }
    column_.items.push_back(std::move(items));
    return true;
  }

  std::shared_ptr<const Column> dictionary_texts(KnownDictionary& known) const {
    const ArrowArray& values = *array_.dictionary;
    const void* offsets = values.n_buffers > 1 ? values.buffers[1] : nullptr;
    const void* bytes = values.n_buffers > 2 ? values.buffers[2] : nullptr;
    if (known.offsets != offsets || known.bytes != bytes || known.length != values.length ||
        values.offset != 0) {
      known.texts =
          std::make_shared<const Column>(column_of(*schema_.dictionary, values, column_.memory));
      known.offsets = offsets;
      known.bytes = bytes;
      known.length = values.length;
    }
    return known.texts;
  }

  // The numbers of values as 32 bits; Arrow's own are, as a rule, and stay where they lie.
  const std::int32_t* take_codes(std::int64_t num_values) {
    if (format_ == "i") {
      const auto* codes = values<std::int32_t>(1);
      check_codes(codes, num_values);
      return codes;
    }
    if (!take_numbers() || column_.kind != Kind::kWhole) fail(schema_, "has no numbers of values");
    check_codes(column_.wholes, num_values);
    column_.own_codes.assign(column_.wholes, column_.wholes + size());
    column_.wholes = nullptr;
    return column_.own_codes.data();
  }

  template <class T>
  void check_codes(const T* codes, std::int64_t num_values) const {
    bool is_bad = false;
    for (std::size_t i = 0; i < size(); ++i) {
      const bool is_outside = codes[i] < 0 || codes[i] >= num_values;
      is_bad |= is_outside && (column_.is_null.empty() || column_.is_null[i] == 0);
    }
    if (is_bad) fail(schema_, "names a value that is not there");
  }

  // Numbers of values, which stay numbers: much is known of a value once for all of its rows.
  void from_dictionary() {
    if (array_.dictionary == nullptr) fail(schema_, "has no dictionary");
    KnownDictionary own;
    const auto all = dictionary_texts(known_ != nullptr ? *known_ : own);
    if (all->num_rows > std::numeric_limits<std::int32_t>::max()) {
      fail(schema_, "has a dictionary of more than 2^31 values");
    }
    column_.codes = take_codes(all->num_rows);
    if (all->kind != Kind::kText) {
      column_.kind = Kind::kOther;
      column_.type = "a dictionary of what is no text";
      return;
    }
    column_.kind = Kind::kText;
    column_.dictionary = all;
  }

  const ArrowSchema& schema_;
  const ArrowArray& array_;
  std::string_view format_;
  KnownDictionary* known_;
  Column column_;
};

}  // namespace

Column column_of(const ArrowSchema& schema, const ArrowArray& array,
                 std::shared_ptr<const void> memory, KnownDictionary* known) {
  return Importer(schema, array, std::move(memory), known).take();
}

}  // namespace tessera::workloads::data
