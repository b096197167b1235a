#include "data/samples.h"

#include <charconv>
#include <cmath>

#include "data/logarithm.h"
#include "data/numbers.h"

namespace tessera::workloads::data {
namespace {

bool is_same_word(std::string_view cell, std::string_view lower) {
  return std::equal(cell.begin(), cell.end(), lower.begin(), lower.end(),
                    [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a + 32 : a) == b; });
}

}  // namespace

std::string shown(std::string_view cell) {
  std::string text = "'";
  for (const char c : cell.substr(0, 40)) {
    text += static_cast<unsigned char>(c) >= ' ' && c != '\x7f' ? c : '?';
  }
  return text + (cell.size() > 40 ? "...'" : "'");
}

Samples::Samples(const Schema& schema, const TableOptions& options,
                 const std::function<void(dlrm::SampleBlock&)>& take)
    : schema_(schema),
      options_(options),
      take_(take),
      features_(schema.features.size()),
      known_(schema.features.size()) {
  dense_.resize(schema.dense.size());
  for (std::size_t f = 0; f < features_.size(); ++f) {
    const auto& values = schema.features[f].values;
    for (std::size_t i = 0; i < values.size(); ++i) {
      features_[f].rows.emplace(values[i], static_cast<std::int64_t>(i));
    }
  }
  for (const std::string& text : schema.missing) {
    double value = 0;
    longest_missing_ = std::max(longest_missing_, text.size());
    if (!text.empty()) begins_missing_[static_cast<unsigned char>(text[0])] = true;
    misses_numbers_ = misses_numbers_ || (parse_real(text, value) && std::isfinite(value));
  }
}

bool Samples::set_label(std::string_view cell) {
  const LabelColumn& label = schema_.label;
  if (!label.positive.empty()) {
    if (is_missing(cell)) return fail("the label is missing");
    const auto& words = label.positive;
    label_ = std::find(words.begin(), words.end(), cell) != words.end() ? 1 : 0;
    return true;
  }
  if (cell.size() == 1 && (cell[0] == '0' || cell[0] == '1') && !label.threshold) {
    label_ = cell[0] == '1' ? 1 : 0;
    return true;
  }
  if (is_missing(cell)) return fail("the label is missing");
  double value = 0;
  const bool is_number = parse_real(cell, value) && std::isfinite(value);
  if (label.threshold) {
    if (!is_number) return fail("label " + shown(cell) + " is not a number");
    label_ = value >= *label.threshold ? 1 : 0;
    return true;
  }
  if (is_same_word(cell, "true")) value = 1;
  if (is_same_word(cell, "false")) value = 0;
  const bool is_word = is_same_word(cell, "true") || is_same_word(cell, "false");
  if (!is_word && (!is_number || (value != 0 && value != 1))) {
    return fail("label " + shown(cell) + " is neither 0 nor 1; positive or threshold in [label] " +
                "say what else counts as 1");
  }
  label_ = static_cast<float>(value);
  return true;
}

bool Samples::set_dense(std::size_t number, std::string_view cell) {
  const DenseColumn& column = schema_.dense[number];
  double value = 0;
  if (is_missing(cell)) {
    if (!column.missing) return fail("there is no value, and missing is \"error\"");
    value = *column.missing;
  } else if (!parse_real(cell, value)) {
    return fail(shown(cell) + " is not a number");
  } else if (!std::isfinite(value)) {
    return fail(shown(cell) + " is not a finite number");
  }
  return keep_dense(number, value) || fail(shown(cell) + " is too large for 32 bits");
}

// False for what 32 bits cannot hold.
bool Samples::keep_dense(std::size_t number, double value) {
  const DenseColumn& column = schema_.dense[number];
  if (column.low) value = std::clamp(value, *column.low, *column.high);
  dense_[number] = static_cast<float>(column.log1p ? logarithm(value) : value);
  return std::isfinite(dense_[number]);
}

bool Samples::add_value(std::size_t feature, std::string_view value) {
  const FeatureColumn& column = schema_.features[feature];
  Bags& bags = features_[feature];
  if (column.most > 0 && static_cast<std::int64_t>(bags.ids.size() - bags.kept) == column.most) {
    return true;
  }
  std::int64_t row = 0;
  if (is_raw(column) && column.kind != IdKind::kInteger) {
    row = id_of_text(value);
  } else if (column.kind == IdKind::kHash) {
    row = hashed_row(value, column.rows);
  } else if (column.kind == IdKind::kVocabulary) {
    const auto found = bags.rows.find(value);
    row = found == bags.rows.end() ? column.rows - 1 : found->second;
  } else if (is_raw(column)) {
    if (!parse_id(value, row)) return fail(shown(value) + " is not a whole number of 64 bits");
  } else {
    if (!parse_whole(value, row)) return fail(shown(value) + " is not a whole number");
    return add_id(feature, row);
  }
  bags.ids.push_back(row);
  return true;
}

bool Samples::add_id(std::size_t feature, std::int64_t id) {
  const FeatureColumn& column = schema_.features[feature];
  if (is_raw(column)) {
    // As it is.
  } else if (column.wraps) {
    id %= column.rows;
    if (id < 0) id += column.rows;
  } else if (id < 0 || id >= column.rows) {
    return fail("id " + std::to_string(id) + " is not in a table of " +
                std::to_string(column.rows) +
                " rows; give it more rows, or outside = \"wrap\", or kind = \"hash\"");
  }
  features_[feature].ids.push_back(id);
  return true;
}

bool Samples::add_cell(std::size_t feature, std::string_view cell) {
  const FeatureColumn& column = schema_.features[feature];
  const bool is_missing_cell = is_missing(cell);
  if (column.separator.empty()) {
    if (!is_missing_cell) return add_value(feature, cell);
    if (column.empties) return true;
    if (column.kind == IdKind::kInteger) {
      return fail("there is no value; missing = \"empty\" allows that");
    }
    // A row of its own; of a vocabulary, that of other values.
    return add_value(feature, "");
  }
  if (is_missing_cell) return true;
  const std::string_view separator = column.separator;
  for (;;) {
    const std::size_t end = cell.find(separator);
    const std::string_view value = trimmed(cell.substr(0, end));
    if (!value.empty() && !add_value(feature, value)) return false;
    if (end == std::string_view::npos) return true;
    cell.remove_prefix(end + separator.size());
  }
}

// Here, where the compiler sees all that happens to a cell.
const Role* Samples::set_all(const std::vector<Role>& roles,
                             const std::vector<std::string_view>& cells) {
  for (const Role& role : roles) {
    if (!set(role, cells[role.column])) return &role;
  }
  return nullptr;
}

bool Samples::set_nothing(const Role& role) {
  // As an empty cell, whatever the schema counts as missing.
  return is_missing("") ? set(role, "") : fail("there is no value");
}

bool Samples::set(const Role& role, const Column& column, std::int64_t row) {
  if (!column.has(row)) return set_nothing(role);
  if (column.kind == Column::Kind::kOther) {
    return fail("is " + column.type + ", neither number nor text; convert it before");
  }
  std::string memory;
  if (column.kind != Column::Kind::kList) return set(role, column.text(row, memory));
  if (role.kind != Role::Kind::kFeature || schema_.features[role.number].separator.empty()) {
    return fail("there is a list of values; a feature with a separator takes one");
  }
  const Column& items = column.items[0];
  const auto place = static_cast<std::size_t>(row);
  for (std::int64_t i = column.begins[place]; i < column.begins[place + 1]; ++i) {
    if (!items.has(i)) continue;
    const std::string_view value = trimmed(items.text(i, memory));
    if (!value.empty() && !add_value(role.number, value)) return false;
  }
  return true;
}

void Samples::finish() {
  block_.labels.push_back(label_);
  block_.dense.insert(block_.dense.end(), dense_.begin(), dense_.end());
  for (Bags& bags : features_) {
    bags.lengths.push_back(static_cast<std::int32_t>(bags.ids.size() - bags.kept));
    bags.kept = bags.ids.size();
  }
  ++num_samples_;
  if (++block_.num_samples >= options_.block_samples) flush();
}

void Samples::drop() {
  for (Bags& bags : features_) bags.ids.resize(bags.kept);
}

void Samples::flush() {
  if (block_.num_samples == 0) return;
  block_.lengths.clear();
  block_.ids.clear();
  std::size_t num_ids = 0;
  for (const Bags& bags : features_) num_ids += bags.ids.size();
  block_.lengths.reserve(features_.size() * static_cast<std::size_t>(block_.num_samples));
  block_.ids.reserve(num_ids);
  for (Bags& bags : features_) {
    block_.lengths.insert(block_.lengths.end(), bags.lengths.begin(), bags.lengths.end());
    block_.ids.insert(block_.ids.end(), bags.ids.begin(), bags.ids.end());
    bags.lengths.clear();
    bags.ids.clear();
    bags.kept = 0;
  }
  take_(block_);
  block_.labels.clear();
  block_.dense.clear();
  block_.num_samples = 0;
}

// Makes room for so many samples, and gives it back if `add` says that one does not fit.
template <class Add>
bool Samples::add_all(std::int64_t num_rows, const Add& add) {
  const auto before = static_cast<std::size_t>(block_.num_samples);
  const std::size_t after = before + static_cast<std::size_t>(num_rows);
  std::vector<std::size_t> kept;
  for (const Bags& bags : features_) kept.push_back(bags.kept);
  block_.labels.resize(after, 0);
  block_.dense.resize(after * dense_.size());
  if (!add()) {
    block_.labels.resize(before);
    block_.dense.resize(before * dense_.size());
    for (std::size_t f = 0; f < features_.size(); ++f) {
      features_[f].kept = kept[f];
      features_[f].ids.resize(kept[f]);
      features_[f].lengths.resize(before);
    }
    return false;
  }
  num_samples_ += num_rows;
  block_.num_samples += num_rows;
  if (block_.num_samples >= options_.block_samples) flush();
  return true;
}

bool Samples::add_columns(const std::vector<Role>& roles, const std::vector<Column>& columns,
                          std::int64_t num_rows) {
  return add_all(num_rows, [&] {
    return std::all_of(roles.begin(), roles.end(), [&](const Role& role) {
      return add_column(role, columns[role.column], num_rows);
    });
  });
}

bool Samples::add_cells(const std::vector<Role>& roles, const CellRun& run) {
  return add_all(static_cast<std::int64_t>(run.num_records), [&] {
    return std::all_of(roles.begin(), roles.end(),
                       [&](const Role& role) { return add_cell_column(role, run); });
  });
}

// What a column is, is asked once and not for every cell.
bool Samples::add_cell_column(const Role& role, const CellRun& run) {
  if (role.kind == Role::Kind::kLabel) {
    float* to = block_.labels.data() + block_.num_samples;
    for (std::size_t i = 0; i < run.num_records; ++i) {
      if (!set_label(run.cell(i, role.column))) return false;
      to[i] = label_;
    }
    return true;
  }
  if (role.kind == Role::Kind::kDense) return add_dense_cells(role, run);
  const FeatureColumn& column = schema_.features[role.number];
  if (!is_raw(column)) {
    if (column.is_single() && column.kind == IdKind::kHash) return add_hashed_cells(role, run);
    if (column.is_single() && column.kind == IdKind::kInteger && !column.wraps) {
      return add_whole_cells(role, run);
    }
    if (column.separator.size() == 1 && column.kind == IdKind::kHash) {
      return add_bags_of_hashes(role, run);
    }
  }
  Bags& bags = features_[role.number];
  for (std::size_t i = 0; i < run.num_records; ++i) {
    if (!add_cell(role.number, run.cell(i, role.column))) return false;
    bags.lengths.push_back(static_cast<std::int32_t>(bags.ids.size() - bags.kept));
    bags.kept = bags.ids.size();
  }
  return true;
}

bool Samples::add_dense_cells(const Role& role, const CellRun& run) {
  const std::optional<double> missing = schema_.dense[role.number].missing;
  numbers_.resize(run.num_records);
  for (std::size_t i = 0; i < run.num_records; ++i) {
    const std::string_view cell = run.cell(i, role.column);
    if (is_missing(cell)) {
      if (!missing) return false;
      numbers_[i] = *missing;
    } else if (!parse_real_nearby(cell, numbers_[i])) {
      return false;
    }
  }
  return keep_numbers(role.number, static_cast<std::size_t>(block_.num_samples), numbers_);
}

// As the schema says, into the dense numbers of the samples from `first` on. False if one is not
// finite, or becomes so in 32 bits.
bool Samples::keep_numbers(std::size_t number, std::size_t first, std::vector<double>& values) {
  const DenseColumn& column = schema_.dense[number];
  // x - x is 0 if x is finite, and only then; there is no branch for compilers to stumble over.
  double zero = 0;
  for (const double value : values) zero += value - value;
  if (zero != 0) return false;
  if (column.low) {
    for (double& value : values) value = std::clamp(value, *column.low, *column.high);
  }
  if (column.log1p) {
    for (double& value : values) value = logarithm(value);
  }
  const std::size_t width = dense_.size();
  float* to = block_.dense.data() + first * width + number;
  float none = 0;
  for (const double value : values) {
    *to = static_cast<float>(value);
    none += *to - *to;
    to += width;
  }
  return none == 0;
}

bool Samples::add_hashed_cells(const Role& role, const CellRun& run) {
  const std::int64_t rows = schema_.features[role.number].rows;
  Bags& bags = features_[role.number];
  bags.ids.resize(bags.kept + run.num_records);
  std::int64_t* to = bags.ids.data() + bags.kept;
  const std::int64_t row_of_nothing = hashed_row("", rows);
  for (std::size_t i = 0; i < run.num_records; ++i) {
    const std::string_view cell = run.cell(i, role.column);
    // A missing text has a row of its own, that of nothing.
    to[i] = is_missing(cell) ? row_of_nothing : row_of_hash(hash_of_nearby(cell), rows);
  }
  bags.lengths.insert(bags.lengths.end(), run.num_records, 1);
  bags.kept = bags.ids.size();
  return true;
}

bool Samples::add_whole_cells(const Role& role, const CellRun& run) {
  const std::int64_t rows = schema_.features[role.number].rows;
  Bags& bags = features_[role.number];
  bags.ids.resize(bags.kept + run.num_records);
  std::int64_t* to = bags.ids.data() + bags.kept;
  for (std::size_t i = 0; i < run.num_records; ++i) {
    const std::string_view cell = run.cell(i, role.column);
    if (is_missing(cell) || !parse_whole_nearby(cell, to[i])) return false;
    if (to[i] < 0 || to[i] >= rows) return false;
  }
  bags.lengths.insert(bags.lengths.end(), run.num_records, 1);
  bags.kept = bags.ids.size();
  return true;
}

// Several texts in a cell, between separators of one byte.
bool Samples::add_bags_of_hashes(const Role& role, const CellRun& run) {
  const FeatureColumn& column = schema_.features[role.number];
  const char separator = column.separator[0];
  const auto most = column.most > 0 ? static_cast<std::size_t>(column.most) : SIZE_MAX;
  Bags& bags = features_[role.number];
  for (std::size_t i = 0; i < run.num_records; ++i) {
    const std::string_view cell = run.cell(i, role.column);
    if (!is_missing(cell)) {
      const char* begin = cell.data();
      const char* const end = begin + cell.size();
      for (const char* at = begin; at <= end; ++at) {
        if (at < end && *at != separator) continue;
        const std::string_view value = trimmed({begin, static_cast<std::size_t>(at - begin)});
        if (!value.empty() && bags.ids.size() - bags.kept < most) {
          bags.ids.push_back(row_of_hash(hash_of_nearby(value), column.rows));
        }
        begin = at + 1;
      }
    }
    bags.lengths.push_back(static_cast<std::int32_t>(bags.ids.size() - bags.kept));
    bags.kept = bags.ids.size();
  }
  return true;
}

// Numbers into the dense numbers of all rows.
template <class T>
bool Samples::add_numbers(const Role& role, const Column& column, const T* values) {
  const DenseColumn& dense = schema_.dense[role.number];
  const bool is_plain = !dense.log1p && !dense.low;
  numbers_.resize(static_cast<std::size_t>(column.num_rows));
  for (std::int64_t row = 0; row < column.num_rows; ++row) {
    double& value = numbers_[static_cast<std::size_t>(row)];
    if (!column.has(row)) {
      if (!dense.missing || !is_missing("")) return false;
      value = *dense.missing;
    } else if constexpr (std::is_same_v<T, float>) {
      // The digits of a text stand for the nearest double of theirs, which a logarithm can tell
      // from the float.
      value = static_cast<double>(values[row]);
      if (!is_plain && std::isfinite(values[row])) parse_real(text_of_real(values[row]), value);
    } else {
      value = static_cast<double>(values[row]);
    }
  }
  return keep_numbers(role.number, static_cast<std::size_t>(block_.num_samples), numbers_);
}

// Whole numbers as ids: rows themselves, or the hashes of their digits.
bool Samples::add_ids(std::size_t feature, const Column& column) {
  const FeatureColumn& wanted = schema_.features[feature];
  const bool is_hashed = wanted.kind == IdKind::kHash;
  Bags& bags = features_[feature];
  if (!is_hashed && column.is_null.empty() && !wanted.wraps && !is_raw(wanted)) {
    const auto count = static_cast<std::size_t>(column.num_rows);
    const std::int64_t* const end = column.wholes + count;
    const auto is_outside = [&](std::int64_t id) { return id < 0 || id >= wanted.rows; };
    if (std::any_of(column.wholes, end, is_outside)) return false;
    bags.ids.insert(bags.ids.end(), column.wholes, end);
    bags.lengths.insert(bags.lengths.end(), count, 1);
    bags.kept = bags.ids.size();
    return true;
  }
  for (std::int64_t row = 0; row < column.num_rows; ++row) {
    if (!column.has(row)) {
      if (!is_missing("") || !add_cell(feature, "")) return false;
    } else if (is_hashed) {
      char digits[24];
      const char* end = std::to_chars(digits, digits + sizeof(digits), column.wholes[row]).ptr;
      const std::string_view text(digits, static_cast<std::size_t>(end - digits));
      bags.ids.push_back(is_raw(wanted) ? id_of_text(text) : hashed_row(text, wanted.rows));
    } else if (!add_id(feature, column.wholes[row])) {
      return false;
    }
    bags.lengths.push_back(static_cast<std::int32_t>(bags.ids.size() - bags.kept));
    bags.kept = bags.ids.size();
  }
  return true;
}

// Texts as rows by their hashes; a missing one has a row of its own, that of nothing.
bool Samples::add_texts(std::size_t feature, const Column& column) {
  Bags& bags = features_[feature];
  const std::int64_t rows = schema_.features[feature].rows;
  const auto count = static_cast<std::size_t>(column.num_rows);
  bags.ids.resize(bags.kept + count);
  std::int64_t* to = bags.ids.data() + bags.kept;
  for (std::int64_t row = 0; row < column.num_rows; ++row) {
    if (!column.has(row) && !is_missing("")) return false;
    std::string_view text;
    if (column.has(row)) text = column.text_at(row);
    *to++ = hashed_row(is_missing(text) ? std::string_view() : text, rows);
  }
  bags.lengths.insert(bags.lengths.end(), count, 1);
  bags.kept = bags.ids.size();
  return true;
}

// Texts of a dictionary: what becomes of a value is found out once, when a row has it.
bool Samples::add_known_texts(std::size_t feature, const Column& column) {
  const auto count = static_cast<std::size_t>(column.num_rows);
  Bags& bags = features_[feature];
  Known& known = known_[feature];
  if (known.dictionary != column.dictionary) {
    known.dictionary = column.dictionary;
    known.parts.assign(column.dictionary->texts.size(), {});
    known.ids.clear();
  }
  bags.ids.reserve(bags.ids.size() + count);
  bags.lengths.reserve(bags.lengths.size() + count);
  for (std::int64_t row = 0; row < column.num_rows; ++row) {
    if (!column.has(row)) {
      if (!is_missing("") || !add_cell(feature, "")) return false;
    } else {
      Known::Part& part = known.parts[static_cast<std::size_t>(column.codes[row])];
      if (part.length < 0) {
        if (!add_cell(feature, column.text_at(row))) return false;
        part.begin = static_cast<std::uint32_t>(known.ids.size());
        part.length = static_cast<std::int32_t>(bags.ids.size() - bags.kept);
        known.ids.insert(known.ids.end(), bags.ids.begin() + static_cast<std::ptrdiff_t>(bags.kept),
                         bags.ids.end());
      } else if (part.length == 1) {
        bags.ids.push_back(known.ids[part.begin]);
      } else {
        const auto from = known.ids.begin() + static_cast<std::ptrdiff_t>(part.begin);
        bags.ids.insert(bags.ids.end(), from, from + part.length);
      }
    }
    bags.lengths.push_back(static_cast<std::int32_t>(bags.ids.size() - bags.kept));
    bags.kept = bags.ids.size();
  }
  return true;
}

// Labels that are whole numbers, nothing else being said of them.
bool Samples::add_labels(const Column& column) {
  float* to = block_.labels.data() + block_.num_samples;
  for (std::int64_t row = 0; row < column.num_rows; ++row) {
    if (!column.has(row) || column.wholes[row] < 0 || column.wholes[row] > 1) return false;
    to[row] = static_cast<float>(column.wholes[row]);
  }
  return true;
}

bool Samples::add_column(const Role& role, const Column& column, std::int64_t num_rows) {
  using Kind = Column::Kind;
  const bool is_whole = column.kind == Kind::kWhole;
  const LabelColumn& label = schema_.label;
  if (role.kind == Role::Kind::kLabel && is_whole && label.positive.empty() && !label.threshold &&
      !misses_numbers_) {
    return add_labels(column);
  }
  if (role.kind == Role::Kind::kDense && !misses_numbers_) {
    if (is_whole) return add_numbers(role, column, column.wholes);
    if (column.kind == Kind::kReal32) return add_numbers(role, column, column.reals32);
    if (column.kind == Kind::kReal64) return add_numbers(role, column, column.reals64);
  }
  if (role.kind == Role::Kind::kFeature && is_whole && !misses_numbers_) {
    const FeatureColumn& feature = schema_.features[role.number];
    if (feature.separator.empty() && feature.kind != IdKind::kVocabulary) {
      return add_ids(role.number, column);
    }
  }
  if (role.kind == Role::Kind::kFeature && column.kind == Kind::kText) {
    const FeatureColumn& feature = schema_.features[role.number];
    // Of raw texts all are seen, also the same again.
    if (column.codes != nullptr && !is_raw(feature)) return add_known_texts(role.number, column);
    if (feature.is_single() && feature.kind == IdKind::kHash && !is_raw(feature)) {
      return add_texts(role.number, column);
    }
  }
  // One cell after the other, as from a text.
  const auto first = static_cast<std::size_t>(block_.num_samples);
  for (std::int64_t row = 0; row < num_rows; ++row) {
    if (!set(role, column, row)) return false;
    const std::size_t place = first + static_cast<std::size_t>(row);
    if (role.kind == Role::Kind::kLabel) {
      block_.labels[place] = label_;
    } else if (role.kind == Role::Kind::kDense) {
      block_.dense[place * dense_.size() + role.number] = dense_[role.number];
    } else {
      Bags& bags = features_[role.number];
      bags.lengths.push_back(static_cast<std::int32_t>(bags.ids.size() - bags.kept));
      bags.kept = bags.ids.size();
    }
  }
  return true;
}

}  // namespace tessera::workloads::data
