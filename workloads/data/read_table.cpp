#include "data/read_table.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include <nlohmann/json.hpp>

#include "data/delimited.h"
#include "data/numbers.h"
#include "settings/usage.h"

namespace tessera::workloads::data {
namespace {

using dlrm::SampleBlock;
using Json = nlohmann::json;

// What a file holds, fit for a terminal.
std::string shown(std::string_view cell) {
  std::string text = "'";
  for (const char c : cell.substr(0, 40)) {
    text += static_cast<unsigned char>(c) >= ' ' && c != '\x7f' ? c : '?';
  }
  return text + (cell.size() > 40 ? "...'" : "'");
}

bool is_same_word(std::string_view cell, std::string_view lower) {
  return std::equal(cell.begin(), cell.end(), lower.begin(), lower.end(),
                    [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a + 32 : a) == b; });
}

float logarithm(double value) {
  static const std::vector<float> kTable = [] {
    std::vector<float> table(4096);
    for (std::size_t i = 0; i < table.size(); ++i) {
      table[i] = static_cast<float>(std::log1p(static_cast<double>(i)));
    }
    return table;
  }();
  if (value <= 0) return 0;
  const auto whole = static_cast<std::size_t>(std::min(value, 4096.0));
  if (whole < kTable.size() && static_cast<double>(whole) == value) return kTable[whole];
  return static_cast<float>(std::log1p(value));
}

/// Cells become parts of a sample; samples gather until a block is full.
class Samples {
 public:
  Samples(const Schema& schema, const TableOptions& options,
          const std::function<void(SampleBlock&)>& take)
      : schema_(schema), options_(options), take_(take), features_(schema.features.size()) {
    dense_.resize(schema.dense.size());
    for (std::size_t f = 0; f < features_.size(); ++f) {
      const auto& values = schema.features[f].values;
      for (std::size_t i = 0; i < values.size(); ++i) {
        features_[f].rows.emplace(values[i], static_cast<std::int64_t>(i));
      }
    }
    for (const std::string& text : schema.missing) {
      longest_missing_ = std::max(longest_missing_, text.size());
    }
  }

  bool is_missing(std::string_view cell) const {
    if (cell.size() > longest_missing_) return false;
    return std::find(schema_.missing.begin(), schema_.missing.end(), cell) != schema_.missing.end();
  }

  // Each returns false, and what is wrong in `problem()`, for a cell that does not fit.
  bool set_label(std::string_view cell);
  bool set_dense(std::size_t number, std::string_view cell);
  bool add_cell(std::size_t feature, std::string_view cell);
  bool add_value(std::size_t feature, std::string_view value);  // one of several

  const std::string& problem() const { return problem_; }
  bool fail(std::string text) {
    problem_ = std::move(text);
    return false;
  }

  /// The sample is whole.
  void finish() {
    block_.labels.push_back(label_);
    block_.dense.insert(block_.dense.end(), dense_.begin(), dense_.end());
    for (Bags& bags : features_) {
      bags.lengths.push_back(static_cast<std::int32_t>(bags.ids.size() - bags.kept));
      bags.kept = bags.ids.size();
    }
    ++num_samples_;
    if (++block_.num_samples == options_.block_samples) flush();
  }
  /// Takes back what has been set since the last one.
  void drop() {
    for (Bags& bags : features_) bags.ids.resize(bags.kept);
  }
  void flush() {
    if (block_.num_samples == 0) return;
    block_.lengths.clear();
    block_.ids.clear();
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
  std::int64_t num_samples() const { return num_samples_; }

 private:
  struct Bags {
    std::vector<std::int32_t> lengths;
    std::vector<std::int64_t> ids;
    std::size_t kept = 0;                                       // ids of samples that are whole
    std::unordered_map<std::string_view, std::int64_t> rows{};  // of a vocabulary
  };

  const Schema& schema_;
  const TableOptions& options_;
  const std::function<void(SampleBlock&)>& take_;
  std::size_t longest_missing_ = 0;
  float label_ = 0;
  std::vector<float> dense_;
  std::vector<Bags> features_;
  SampleBlock block_;
  std::int64_t num_samples_ = 0;
  std::string problem_;
};

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
  if (column.low) value = std::clamp(value, *column.low, *column.high);
  dense_[number] = column.log1p ? logarithm(value) : static_cast<float>(value);
  if (!std::isfinite(dense_[number])) return fail(shown(cell) + " is too large for 32 bits");
  return true;
}

bool Samples::add_value(std::size_t feature, std::string_view value) {
  const FeatureColumn& column = schema_.features[feature];
  Bags& bags = features_[feature];
  if (column.most > 0 && static_cast<std::int64_t>(bags.ids.size() - bags.kept) == column.most) {
    return true;
  }
  std::int64_t row = 0;
  if (options_.raw_ids && column.kind != IdKind::kInteger) {
    row = raw_id(value);
  } else if (column.kind == IdKind::kHash) {
    row = hashed_row(value, column.rows);
  } else if (column.kind == IdKind::kVocabulary) {
    const auto found = bags.rows.find(value);
    row = found == bags.rows.end() ? column.rows - 1 : found->second;
  } else {
    if (!parse_whole(value, row)) return fail(shown(value) + " is not a whole number");
    if (options_.raw_ids) {
      bags.ids.push_back(row);
      return true;
    }
    if (column.wraps) {
      row %= column.rows;
      if (row < 0) row += column.rows;
    } else if (row < 0 || row >= column.rows) {
      return fail("id " + std::to_string(row) + " is not in a table of " +
                  std::to_string(column.rows) +
                  " rows; give it more rows, or outside = \"wrap\", or kind = \"hash\"");
    }
  }
  bags.ids.push_back(row);
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

/// What becomes of the cells of one file.
struct Role {
  enum class Kind : std::uint8_t { kLabel, kDense, kFeature };
  Kind kind;
  std::size_t number;  // among those of its kind
  std::size_t column;  // of the file
  std::string name;    // of the column
};

std::vector<Role> roles_of(const Schema& schema, const TableOptions& options) {
  std::vector<Role> roles;
  if (!options.has_no_label) roles.push_back({Role::Kind::kLabel, 0, 0, schema.label.column});
  for (std::size_t i = 0; i < schema.dense.size(); ++i) {
    roles.push_back({Role::Kind::kDense, i, 0, schema.dense[i].column});
  }
  for (std::size_t i = 0; i < schema.features.size(); ++i) {
    roles.push_back({Role::Kind::kFeature, i, 0, schema.features[i].column});
  }
  return roles;
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < 12; ++i) text += (i > 0 ? ", " : "") + names[i];
  if (names.size() > 12) text += " and " + std::to_string(names.size() - 12) + " more";
  return text;
}

void find_columns(std::vector<Role>& roles, const std::vector<std::string>& names,
                  const std::string& file) {
  for (Role& role : roles) {
    const auto found = std::find(names.begin(), names.end(), role.name);
    if (found == names.end()) {
      const std::string hint = settings::suggestion(role.name, names);
      throw DataError(file + ": there is no column '" + role.name + "'" +
                      (hint.empty() ? "." : hint) + " There are " + listed(names) + ".");
    }
    if (std::find(found + 1, names.end(), role.name) != names.end()) {
      throw DataError(file + ": two columns are named '" + role.name + "'.");
    }
    role.column = static_cast<std::size_t>(found - names.begin());
  }
  // Cells are read in the order in which they lie.
  std::stable_sort(roles.begin(), roles.end(),
                   [](const Role& a, const Role& b) { return a.column < b.column; });
}

/// Reads files into samples and keeps the report.
class TableReader {
 public:
  TableReader(const Schema& schema, const TableOptions& options,
              const std::function<void(SampleBlock&)>& take)
      : schema_(schema), options_(options), samples_(schema, options, take) {}

  void read(const std::string& path, bool is_last) {
    Input input(path, is_last ? options_.goes_on : nullptr);
    const TextFormat format = text_format(schema_, input.front());
    if (format.format == Format::kJsonLines) {
      read_lines(input);
    } else {
      read_cells(input, format.separator);
    }
    report_.num_bytes += input.num_bytes();
  }

  TableReport finish() {
    samples_.flush();
    report_.num_samples = samples_.num_samples();
    return std::move(report_);
  }

 private:
  bool is_enough() const { return options_.most >= 0 && report_.num_records >= options_.most; }

  void refuse(const std::string& text) {
    samples_.drop();
    if (!options_.skips_bad) throw DataError(text + ".");
    if (report_.num_bad++ < options_.num_named) report_.first_bad.push_back(text);
  }
  void refuse(const Input& input, std::int64_t line, const Role& role, std::size_t column) {
    std::string place = input.name() + ": line " + std::to_string(line) + ", column '" + role.name;
    place += column > 0 ? "' (" + std::to_string(column) + "): " : "': ";
    refuse(place + samples_.problem());
  }

  bool set(const Role& role, std::string_view cell) {
    switch (role.kind) {
      case Role::Kind::kLabel:
        return samples_.set_label(cell);
      case Role::Kind::kDense:
        return samples_.set_dense(role.number, cell);
      default:
        return samples_.add_cell(role.number, cell);
    }
  }

  void read_cells(Input& input, char separator) {
    Delimited text(input, separator);
    std::vector<std::string_view> cells;
    std::vector<std::string> names = schema_.columns;
    if (names.empty()) {
      if (!text.next(cells)) throw DataError(input.name() + ": is empty.");
      for (const std::string_view cell : cells) names.emplace_back(trimmed(cell));
    }
    std::vector<Role> roles = roles_of(schema_, options_);
    find_columns(roles, names, input.name());
    while (!is_enough() && text.next(cells)) {
      if (cells.size() != names.size()) {
        if (cells.size() == 1 && cells[0].empty()) continue;  // an empty line
        ++report_.num_records;
        refuse(input.name() + ": line " + std::to_string(text.line()) + " has " +
               std::to_string(cells.size()) + " cells; there are " + std::to_string(names.size()) +
               " columns");
        continue;
      }
      ++report_.num_records;
      const Role* bad = nullptr;
      for (const Role& role : roles) {
        if (set(role, cells[role.column])) continue;
        bad = &role;
        break;
      }
      if (bad == nullptr) {
        samples_.finish();
      } else {
        refuse(input, text.line(), *bad, bad->column + 1);
      }
    }
  }

  // The text of a value that is neither null nor a list.
  static std::string_view text_of(const Json& value, std::string& memory) {
    if (value.is_string()) return value.get_ref<const std::string&>();
    memory = value.dump();
    return memory;
  }

  bool set_json(const Role& role, const Json& record) {
    const auto found = record.find(role.name);
    if (found == record.end() || found->is_null()) {
      // As an empty cell, whatever the schema counts as missing.
      return samples_.is_missing("") ? set(role, "") : samples_.fail("there is no value");
    }
    std::string memory;
    if (found->is_object()) return samples_.fail("a value in braces is neither number nor text");
    if (!found->is_array()) return set(role, text_of(*found, memory));
    const bool takes_several =
        role.kind == Role::Kind::kFeature && !schema_.features[role.number].separator.empty();
    if (!takes_several) {
      return samples_.fail("there is a list of values; a feature with a separator takes one");
    }
    for (const Json& one : *found) {
      if (one.is_structured()) return samples_.fail("there is a list in a list");
      if (!one.is_null() && !samples_.add_value(role.number, text_of(one, memory))) return false;
    }
    return true;
  }

  void read_lines(Input& input) {
    Lines lines(input);
    const std::vector<Role> roles = roles_of(schema_, options_);
    std::string_view line;
    while (!is_enough() && lines.next(line)) {
      if (trimmed(line).empty()) continue;
      ++report_.num_records;
      const Json record = Json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (!record.is_object()) {
        refuse(input.name() + ": line " + std::to_string(lines.line()) + " is not a JSON object");
        continue;
      }
      const Role* bad = nullptr;
      for (const Role& role : roles) {
        if (set_json(role, record)) continue;
        bad = &role;
        break;
      }
      if (bad == nullptr) {
        samples_.finish();
      } else {
        refuse(input, lines.line(), *bad, 0);
      }
    }
  }

  const Schema& schema_;
  const TableOptions& options_;
  Samples samples_;
  TableReport report_;
};

}  // namespace

TextFormat text_format(const Schema& schema, std::string_view front) {
  TextFormat found;
  if (front.starts_with("\xef\xbb\xbf")) front.remove_prefix(3);
  const std::size_t begin = front.find_first_not_of(" \t\r\n");
  found.format = schema.format;
  if (found.format == Format::kAny) {
    const bool is_json = begin != std::string_view::npos && front[begin] == '{';
    found.format = is_json ? Format::kJsonLines : Format::kCsv;
  }
  const std::string_view line = front.substr(0, front.find('\n'));
  if (schema.separator != 0) {
    found.separator = schema.separator;
  } else if (found.format == Format::kTsv) {
    found.separator = '\t';
  } else if (schema.format == Format::kAny) {
    // Tabs, semicolons and bars in a line of names are hardly anything else.
    for (const char one : {'\t', ',', ';', '|'}) {
      if (line.find(one) == std::string_view::npos) continue;
      found.separator = one;
      break;
    }
  }
  return found;
}

TableReport read_tables(const std::vector<std::string>& paths, const Schema& schema,
                        const TableOptions& options,
                        const std::function<void(SampleBlock&)>& take) {
  TableReader reader(schema, options, take);
  for (const std::string& path : paths) reader.read(path, &path == &paths.back());
  return reader.finish();
}

}  // namespace tessera::workloads::data
