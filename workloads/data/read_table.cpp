#include "data/read_table.h"

#include <algorithm>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "data/columns.h"
#include "data/delimited.h"
#include "data/json_lines.h"
#include "data/numbers.h"
#include "data/samples.h"
#include "settings/usage.h"

namespace tessera::workloads::data {
namespace {

using dlrm::SampleBlock;
using Json = nlohmann::json;

// Of objects, as many programs write a table into one text.
bool begins_array(std::string_view front) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const std::size_t begin = front.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos || front[begin] != '[') return false;
  const std::size_t next = front.find_first_not_of(kBlanks, begin + 1);
  return next != std::string_view::npos && front[next] == '{';
}

// Of text, taken column by column: their cells stay in the caches.
constexpr std::size_t kRecords = 256;

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
    if (path != "-") {
      const FileKind kind = content_of(front_of(path)).kind;
      if (is_columnar(kind)) {
        read_columns(*open_columns(path, kind), path);
        report_.num_bytes += static_cast<std::int64_t>(std::filesystem::file_size(path));
        return;
      }
    }
    Input input(path, is_last ? options_.goes_on : nullptr);
    const TextFormat format = text_format(schema_, input);
    if (format.format == Format::kJsonLines) {
      read_lines(input);
    } else {
      read_cells(input, format.separator);
    }
    report_.num_bytes += input.num_bytes();
  }

  void read_columns(ColumnSource& source, const std::string& path) {
    std::vector<Role> roles = roles_of(schema_, options_);
    leave_out_label(roles, source.names());
    find_columns(roles, source.names(), path);
    // Only those are read that mean something, each once; roles count them from now on.
    std::vector<std::size_t> chosen;
    for (Role& role : roles) {
      if (chosen.empty() || chosen.back() != role.column) chosen.push_back(role.column);
      role.column = chosen.size() - 1;
    }
    source.choose(chosen);
    std::int64_t num_before = 0;
    std::vector<Column> columns;
    while (!is_enough() && source.next(columns)) {
      const std::int64_t num_rows = columns[0].num_rows;
      if (options_.most < 0 && samples_.add_columns(roles, columns, num_rows)) {
        report_.num_records += num_rows;
      } else {
        for (std::int64_t row = 0; row < num_rows && !is_enough(); ++row) {
          read_row(path, roles, columns, row, num_before + row + 1);
        }
      }
      num_before += num_rows;
    }
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

  void leave_out_label(std::vector<Role>& roles, const std::vector<std::string>& names) const {
    if (!options_.label_may_miss ||
        std::find(names.begin(), names.end(), schema_.label.column) != names.end()) {
      return;
    }
    std::erase_if(roles, [](const Role& role) { return role.kind == Role::Kind::kLabel; });
  }

  // Sets all of a record by `set`; returns what does not fit, or nothing.
  template <class Set>
  static const Role* first_bad(const std::vector<Role>& roles, const Set& set) {
    for (const Role& role : roles) {
      if (!set(role)) return &role;
    }
    return nullptr;
  }

  void read_row(const std::string& path, const std::vector<Role>& roles,
                const std::vector<Column>& columns, std::int64_t row, std::int64_t number) {
    ++report_.num_records;
    const Role* bad = first_bad(
        roles, [&](const Role& role) { return samples_.set(role, columns[role.column], row); });
    if (bad == nullptr) {
      samples_.finish();
    } else {
      refuse(path + ": row " + std::to_string(number) + ", column '" + bad->name +
             "': " + samples_.problem());
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
    leave_out_label(roles, names);
    find_columns(roles, names, input.name());
    while (!is_enough()) {
      // Records that are as they should be go column by column, the others one by one.
      if (options_.most < 0) {
        const CellRun run = text.next_run(names.size(), std::min(kRecords, samples_.room()));
        if (run.num_records > 0) {
          read_run(input, roles, run);
          continue;
        }
      }
      if (!text.next(cells)) break;
      if (cells.size() != names.size()) {
        if (cells.size() == 1 && cells[0].empty()) continue;  // an empty line
        ++report_.num_records;
        refuse(input.name() + ": line " + std::to_string(text.line()) + " has " +
               std::to_string(cells.size()) + " cells; there are " + std::to_string(names.size()) +
               " columns");
        continue;
      }
      read_record(input, roles, cells, text.line());
    }
  }

  void read_run(const Input& input, const std::vector<Role>& roles, const CellRun& run) {
    if (samples_.add_cells(roles, run)) {
      report_.num_records += static_cast<std::int64_t>(run.num_records);
      return;
    }
    std::vector<std::string_view> cells(run.width);
    for (std::size_t i = 0; i < run.num_records; ++i) {
      for (std::size_t c = 0; c < run.width; ++c) cells[c] = run.cell(i, c);
      read_record(input, roles, cells, run.first_line + static_cast<std::int64_t>(i));
    }
  }

  void read_record(const Input& input, const std::vector<Role>& roles,
                   const std::vector<std::string_view>& cells, std::int64_t line) {
    ++report_.num_records;
    const Role* bad = samples_.set_all(roles, cells);
    if (bad == nullptr) {
      samples_.finish();
    } else {
      refuse(input, line, *bad, bad->column + 1);
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
    if (found == record.end() || found->is_null()) return samples_.set_nothing(role);
    std::string memory;
    if (found->is_object()) return samples_.fail("a value in braces is neither number nor text");
    if (!found->is_array()) return samples_.set(role, text_of(*found, memory));
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
      const Json record = json_of_line<Json>(line);
      if (!record.is_object()) {
        refuse(input.name() + ": line " + std::to_string(lines.line()) + " is not a JSON object");
        continue;
      }
      const Role* bad = first_bad(roles, [&](const Role& role) { return set_json(role, record); });
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

TextFormat text_format(const Schema& schema, const Input& input) {
  TextFormat found;
  std::string_view front = input.front();
  if (front.starts_with("\xef\xbb\xbf")) front.remove_prefix(3);
  const std::size_t begin = front.find_first_not_of(" \t\r\n");
  found.format = schema.format;
  if (found.format == Format::kAny) {
    const bool is_json =
        begin != std::string_view::npos && (front[begin] == '{' || begins_array(front));
    found.format = is_json ? Format::kJsonLines : Format::kCsv;
  }
  if (found.format == Format::kJsonLines && begins_array(front)) {
    throw DataError(input.name() +
                    ": is one JSON array, not JSON lines. Write an object per line, as jq -c '.[]' "
                    "does.");
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

TableReport read_columns(ColumnSource& source, const std::string& name, const Schema& schema,
                         const TableOptions& options,
                         const std::function<void(SampleBlock&)>& take) {
  TableReader reader(schema, options, take);
  reader.read_columns(source, name);
  return reader.finish();
}

}  // namespace tessera::workloads::data
