// What the columns of a table might be, from its first records.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <unordered_set>

#include <nlohmann/json.hpp>

#include "data/columns.h"
#include "data/delimited.h"
#include "data/json_lines.h"
#include "data/numbers.h"
#include "data/read_table.h"

namespace tessera::workloads::data {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kMostRecords = 50000;
constexpr std::int64_t kLeastRows = 100;
constexpr std::size_t kLongText = 60;
// What separates several values in a cell, the likelier first.
constexpr std::array<char, 4> kSeparators = {'|', ';', ',', ' '};
const std::set<std::string> kMissingWords = {"NA",   "N/A", "null", "NULL",
                                             "None", "NaN", "nan",  "-"};

/// What was seen in a column.
struct Seen {
  std::string name;
  std::int64_t num_values = 0;
  std::int64_t num_missing = 0;
  std::int64_t num_whole = 0;
  std::int64_t num_real = 0;
  std::int64_t num_endless = 0;  // infinity
  std::int64_t num_lists = 0;
  std::string other = {};  // what it is, if neither number nor text
  std::size_t num_bytes = 0;
  double lowest = 0;
  double highest = 0;
  std::unordered_set<std::string> values{};
  std::vector<std::string> first{};
  std::array<std::int64_t, kSeparators.size()> with{};  // cells with this separator
  std::array<std::unordered_set<std::string>, kSeparators.size()> parts{};

  void add(std::string_view cell, std::set<std::string>& missing) {
    if (cell.empty() || kMissingWords.contains(std::string(cell))) {
      if (!cell.empty()) missing.emplace(cell);
      ++num_missing;
      return;
    }
    ++num_values;
    num_bytes += cell.size();
    std::int64_t whole = 0;
    double real = 0;
    const bool has_value = parse_real(cell, real);
    const bool is_real = has_value && std::isfinite(real);
    num_real += is_real ? 1 : 0;
    num_endless += has_value && !is_real ? 1 : 0;
    num_whole += is_real && parse_id(cell, whole) ? 1 : 0;
    if (is_real) {
      lowest = num_real == 1 ? real : std::min(lowest, real);
      highest = num_real == 1 ? real : std::max(highest, real);
    }
    std::string text(cell);
    if (values.insert(text).second && first.size() < 3) first.push_back(text.substr(0, 20));
    if (is_real) return;
    for (std::size_t s = 0; s < kSeparators.size(); ++s) add_parts(s, cell);
  }

  // Infinities beside numbers do not make a column one of texts; its conversion names them.
  bool is_number() const {
    return num_real > 0 && num_real + num_endless == num_values && num_lists == 0;
  }
  bool is_whole() const { return is_number() && num_whole == num_values; }

 private:
  void add_parts(std::size_t s, std::string_view cell) {
    const std::size_t place = cell.find(kSeparators[s]);
    const bool is_prose =
        kSeparators[s] == ',' && place + 1 < cell.size() && cell[place + 1] == ' ';
    with[s] += place != std::string_view::npos && !is_prose ? 1 : 0;
    for (;;) {
      const std::size_t end = cell.find(kSeparators[s]);
      const std::string_view part = trimmed(cell.substr(0, end));
      if (!part.empty()) parts[s].emplace(part);
      if (end == std::string_view::npos) return;
      cell.remove_prefix(end + 1);
    }
  }
};

struct Table {
  std::vector<Seen> columns{};
  std::set<std::string> missing{};
  std::int64_t num_records = 0;
  TextFormat format{};

  Seen& column(const std::string& name) {
    for (Seen& one : columns) {
      if (one.name == name) return one;
    }
    columns.push_back({.name = name});
    columns.back().num_missing = num_records;
    return columns.back();
  }
};

std::string text_of(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

void look_at_lines(Input& input, Table& table) {
  Lines lines(input);
  std::string_view line;
  while (table.num_records < kMostRecords && lines.next(line)) {
    if (trimmed(line).empty()) continue;
    const Json record = json_of_line<Json>(line);
    if (!record.is_object()) {
      throw DataError(input.name() + ": line " + std::to_string(lines.line()) +
                      " is not a JSON object.");
    }
    for (const auto& [name, value] : record.items()) {
      Seen& seen = table.column(name);
      if (value.is_array()) {
        ++seen.num_lists;
        for (const Json& one : value) seen.parts[0].insert(text_of(one));
        ++seen.num_values;
      } else {
        seen.add(value.is_null() ? "" : text_of(value), table.missing);
      }
    }
    ++table.num_records;
  }
}

void look_at_cells(Input& input, Table& table) {
  Delimited text(input, table.format.separator);
  std::vector<std::string_view> cells;
  if (!text.next(cells)) throw DataError(input.name() + ": is empty.");
  for (const std::string_view cell : cells) {
    table.columns.push_back({.name = std::string(trimmed(cell))});
  }
  while (table.num_records < kMostRecords && text.next(cells)) {
    if (cells.size() == 1 && cells[0].empty()) continue;
    if (cells.size() != table.columns.size()) {
      throw DataError(input.name() + ": line " + std::to_string(text.line()) + " has " +
                      std::to_string(cells.size()) + " cells; there are " +
                      std::to_string(table.columns.size()) + " columns.");
    }
    for (std::size_t i = 0; i < cells.size(); ++i) table.columns[i].add(cells[i], table.missing);
    ++table.num_records;
  }
}

void look_at_columns(const std::string& path, FileKind kind, Table& table) {
  const std::unique_ptr<ColumnSource> source = open_columns(path, kind);
  for (const std::string& name : source->names()) table.columns.push_back({.name = name});
  std::vector<Column> columns;
  std::string memory;
  while (table.num_records < kMostRecords && source->next(columns)) {
    for (std::size_t i = 0; i < columns.size(); ++i) {
      const Column& column = columns[i];
      Seen& seen = table.columns[i];
      if (column.kind == Column::Kind::kOther) seen.other = column.type;
      for (std::int64_t row = 0; row < column.num_rows; ++row) {
        if (column.kind == Column::Kind::kOther) continue;
        if (!column.has(row)) {
          seen.add("", table.missing);
        } else if (column.kind != Column::Kind::kList) {
          seen.add(column.text(row, memory), table.missing);
        } else {
          const Column& items = column.items[0];
          const auto place = static_cast<std::size_t>(row);
          ++seen.num_lists;
          ++seen.num_values;
          for (std::int64_t k = column.begins[place]; k < column.begins[place + 1]; ++k) {
            if (items.has(k)) seen.parts[0].emplace(items.text(k, memory));
          }
        }
      }
    }
    table.num_records += columns.empty() ? 0 : columns[0].num_rows;
  }
}

// The words of a name: "userId" and "user_id" have "id".
bool has_word(const std::string& name, const std::set<std::string>& wanted) {
  std::string word;
  bool was_lower = false;
  for (std::size_t i = 0; i <= name.size(); ++i) {
    const char c = i < name.size() ? name[i] : '_';
    const bool is_upper = c >= 'A' && c <= 'Z';
    const bool is_letter = is_upper || (c >= 'a' && c <= 'z');
    if (!is_letter || (is_upper && was_lower)) {
      if (wanted.contains(word)) return true;
      word.clear();
    }
    if (is_letter) word += static_cast<char>(is_upper ? c + 32 : c);
    was_lower = is_letter && !is_upper;
  }
  return false;
}

const Seen* find_label(const Table& table) {
  static const std::set<std::string> kWords = {"label",     "click", "clicked",   "clicks",
                                               "target",    "y",     "converted", "conversion",
                                               "purchased", "bought"};
  const Seen* found = nullptr;
  for (const Seen& column : table.columns) {
    if (column.values.size() != 2 || column.num_missing > 0) continue;
    if (has_word(column.name, kWords)) return &column;
    const bool is_bit = column.is_whole() && column.lowest == 0 && column.highest == 1;
    if (found == nullptr && is_bit) found = &column;
  }
  return found;
}

std::string quoted(const std::string& text) { return Json(text).dump(); }

// A table with room for about four times what was seen, in a round number.
std::int64_t rows_for(std::size_t num_values) {
  const std::uint64_t wanted = std::max<std::uint64_t>(4 * num_values, kLeastRows);
  return static_cast<std::int64_t>(std::bit_ceil(wanted));
}

std::string what_was_seen(const Seen& column) {
  const bool has_lists = column.num_lists > 0;
  std::string text = has_lists ? std::to_string(column.num_lists) + " lists"
                               : std::to_string(column.values.size()) + " values";
  if (!column.first.empty()) {
    text += " such as ";
    for (std::size_t i = 0; i < column.first.size(); ++i) {
      text += (i > 0 ? ", " : "") +
              Json(column.first[i]).dump(-1, ' ', false, Json::error_handler_t::replace);
    }
  }
  if (column.num_missing > 0) text += ", " + std::to_string(column.num_missing) + " missing";
  if (column.is_number() && column.num_endless > 0) {
    text += ", " + std::to_string(column.num_endless) + " not finite";
  }
  return text;
}

// Which separator several values have; none if cells hold one each.
int separator_of(const Seen& column) {
  for (std::size_t s = 0; s < kSeparators.size(); ++s) {
    const bool is_common = column.with[s] * 10 >= column.num_values && column.num_values > 0;
    // Parts come again in other cells; words of a phrase hardly do.
    const bool comes_again = 2 * column.parts[s].size() <= column.values.size() ||
                             (kSeparators[s] != ' ' && column.with[s] * 3 >= column.num_values);
    if (is_common && comes_again) return static_cast<int>(s);
  }
  return -1;
}

void write_feature(std::ostringstream& out, const Seen& column) {
  const int separator = column.num_lists > 0 ? 0 : separator_of(column);
  out << "\n# " << what_was_seen(column);
  if (separator >= 0) {
    out << ", of " << column.parts[static_cast<std::size_t>(separator)].size() << " parts";
  }
  out << "\n[[feature]]\ncolumn = " << quoted(column.name) << "\n";
  const bool is_compact = column.is_whole() && column.lowest >= 0 &&
                          column.highest < 4.0 * static_cast<double>(column.values.size()) + 1000;
  if (is_compact) {
    out << "kind = \"integer\"\nrows = " << static_cast<std::int64_t>(column.highest) + 1
        << "\noutside = \"wrap\"  # ids beyond the rows are taken modulo; \"error\" refuses them\n";
    if (column.num_missing > 0) out << "missing = \"empty\"\n";
    return;
  }
  const std::size_t num_values = separator >= 0
                                     ? column.parts[static_cast<std::size_t>(separator)].size()
                                     : column.values.size();
  out << "kind = \"hash\"\nrows = " << rows_for(num_values) << "\n";
  if (separator >= 0) {
    out << "separator = "
        << quoted(std::string(1, kSeparators[static_cast<std::size_t>(separator)]))
        << "\npooling = \"mean\"\n";
  }
}

void write_dense(std::ostringstream& out, const Seen& column) {
  char range[80];
  std::snprintf(range, sizeof(range), "%g to %g", column.lowest, column.highest);
  out << "\n# " << what_was_seen(column) << ", " << range
      << "\n[[dense]]\ncolumn = " << quoted(column.name) << "\n";
  if (column.lowest >= 0 && column.highest >= 50) out << "log1p = true\n";
  out << "missing = 0.0\n";
}

}  // namespace

std::string guess_schema(const std::string& path) {
  static const std::set<std::string> kIdWords = {"id",   "ids",  "code",     "zip",  "hash",
                                                 "type", "user", "item",     "ad",   "campaign",
                                                 "key",  "cat",  "category", "kind", "device"};
  Table table;
  std::string name = path;
  const FileKind kind = path == "-" ? FileKind::kText : content_of(front_of(path)).kind;
  if (is_columnar(kind)) {
    look_at_columns(path, kind, table);
  } else {
    Input input(path);
    name = input.name();
    table.format = text_format({}, input);
    if (table.format.format == Format::kJsonLines) {
      look_at_lines(input, table);
    } else {
      look_at_cells(input, table);
    }
  }
  if (table.num_records == 0) throw DataError(name + ": has no records.");
  const Seen* label = find_label(table);
  std::ostringstream out;
  out << "# Guessed from the first " << table.num_records << " records of " << name
      << ". Read it, correct it, then:\n#   tessera data convert --schema THIS FILES... --out "
         "clicks.click\n# docs/your_data.md describes every key.\n\n";
  if (is_columnar(kind)) {
    // Known by its content.
  } else if (table.format.format == Format::kJsonLines) {
    out << "format = \"jsonl\"\n";
  } else if (table.format.separator == '\t') {
    out << "format = \"tsv\"\n";
  } else {
    out << "format = \"csv\"\n";
    if (table.format.separator != ',') {
      out << "separator = " << quoted(std::string(1, table.format.separator)) << "\n";
    }
  }
  out << "missing = [\"\"";
  for (const std::string& word : table.missing) out << ", " << quoted(word);
  out << "]  # texts that stand for no value\n\n[label]\n";
  if (label == nullptr) {
    out << "column = \"\"  # no column has two values: name one, and add\n"
           "# positive = [\"yes\"]  or  threshold = 4\n";
  } else {
    out << "column = " << quoted(label->name) << "\n";
    if (!label->is_whole() || label->lowest != 0 || label->highest != 1) {
      out << "positive = [" << quoted(*std::max_element(label->values.begin(), label->values.end()))
          << "]  # all other texts count as 0\n";
    }
  }
  for (const Seen& column : table.columns) {
    if (&column == label) continue;
    if (!column.other.empty()) {
      out << "\n# Left out, because it is " << column.other << ": " << quoted(column.name) << "\n";
    } else if (column.num_values == 0) {
      out << "\n# Left out, because it is empty: " << quoted(column.name) << "\n";
    } else if (column.values.size() == 1 && column.num_missing == 0 && column.num_lists == 0) {
      out << "\n# Left out, because it has one value: " << quoted(column.name) << "\n";
    } else if (column.is_number() && !(column.is_whole() && has_word(column.name, kIdWords))) {
      write_dense(out, column);
    } else if (!column.is_number() && separator_of(column) < 0 && column.num_lists == 0 &&
               column.num_bytes / static_cast<std::size_t>(column.num_values) > kLongText) {
      out << "\n# Left out, because its texts are long: " << quoted(column.name) << "\n";
    } else {
      write_feature(out, column);
    }
  }
  return out.str();
}

}  // namespace tessera::workloads::data
