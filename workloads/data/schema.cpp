#include "data/schema.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <set>
#include <sstream>

#define TOML_HEADER_ONLY 1
#define TOML_ENABLE_FORMATTERS 0
#include <toml++/toml.h>

#include "settings/usage.h"

namespace tessera::workloads::data {
namespace {

constexpr std::int64_t kMostRows = std::int64_t{1} << 48;
constexpr std::int64_t kMostColumns = 4096;

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    char code[8];
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (c == '\t') {
      out += "\\t";
    } else if (static_cast<unsigned char>(c) < ' ') {
      std::snprintf(code, sizeof(code), "\\u%04x", c);
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string list_of(const std::vector<std::string>& words) {
  std::string text = "[";
  for (const std::string& word : words) text += (text.size() > 1 ? ", " : "") + quoted(word);
  return text + "]";
}

std::string number_of(double value) {
  char text[40];
  std::string out(text, std::to_chars(text, text + sizeof(text), value).ptr);
  // TOML tells whole numbers from others.
  return out.find_first_of(".en") == std::string::npos ? out + ".0" : out;
}

/// One table of the file; every key must be asked for.
class Keys {
 public:
  Keys(const toml::table& table, const std::string& path, std::string where,
       std::vector<std::string> known)
      : table_(table), path_(path), where_(std::move(where)) {
    for (const auto& [key, node] : table) {
      const std::string name(key.str());
      if (std::find(known.begin(), known.end(), name) != known.end()) continue;
      fail(node, "there is no key '" + name + "' in " + where_ + settings::suggestion(name, known));
    }
  }

  [[noreturn]] void fail(const toml::node& node, const std::string& what) const {
    throw DataError(path_ + ": line " + std::to_string(node.source().begin.line) + ": " + what +
                    (what.ends_with('?') ? "" : "."));
  }
  [[noreturn]] void fail(const std::string& key, const std::string& what) const {
    const toml::node* node = table_.get(key);
    fail(node != nullptr ? *node : table_, what);
  }
  bool has(const std::string& key) const { return table_.contains(key); }
  const toml::node* find(const std::string& key) const { return table_.get(key); }

  std::string text(const std::string& key, bool is_needed = false) const {
    const toml::node* node = table_.get(key);
    if (node == nullptr && is_needed) fail(table_, where_ + " needs " + key + " = \"...\"");
    if (node == nullptr) return "";
    if (!node->is_string()) fail(*node, key + " is a text in quotes");
    return node->as_string()->get();
  }
  bool flag(const std::string& key) const {
    const toml::node* node = table_.get(key);
    if (node == nullptr) return false;
    if (!node->is_boolean()) fail(*node, key + " is true or false");
    return node->as_boolean()->get();
  }
  std::int64_t whole(const std::string& key, std::int64_t least, std::int64_t most) const {
    const toml::node* node = table_.get(key);
    if (node == nullptr) return 0;
    const auto value = node->is_integer() ? node->as_integer()->get() : least - 1;
    if (value < least || value > most) {
      fail(*node, key + " is a whole number from " + std::to_string(least) + " to " +
                      std::to_string(most));
    }
    return value;
  }
  double real(const toml::node& node, const std::string& key) const {
    const auto value = node.value<double>();
    if (!value || node.is_string() || node.is_boolean() || !std::isfinite(*value)) {
      fail(node, key + " is a number");
    }
    return *value;
  }
  /// One text, or a list of them.
  std::vector<std::string> texts(const std::string& key) const {
    const toml::node* node = table_.get(key);
    if (node == nullptr) return {};
    if (node->is_string()) return {node->as_string()->get()};
    std::vector<std::string> all;
    if (!node->is_array()) fail(*node, key + " is a list of texts");
    for (const auto& one : *node->as_array()) {
      if (!one.is_string()) fail(one, key + " is a list of texts");
      all.push_back(one.as_string()->get());
    }
    return all;
  }
  std::string one_of(const std::string& key, const std::vector<std::string>& words) const {
    if (!has(key)) return words[0];
    const std::string word = text(key);
    if (std::find(words.begin(), words.end(), word) != words.end()) return word;
    std::string all;
    for (const std::string& one : words) all += (all.empty() ? "" : ", ") + one;
    fail(key, key + " is one of " + all + ", not '" + word + "'");
  }

 private:
  const toml::table& table_;
  const std::string& path_;
  std::string where_;
};

LabelColumn read_label(const toml::table& table, const std::string& path) {
  const Keys keys(table, path, "[label]", {"column", "positive", "threshold"});
  LabelColumn label;
  label.column = keys.text("column", /*is_needed=*/true);
  label.positive = keys.texts("positive");
  if (keys.has("threshold")) label.threshold = keys.real(*keys.find("threshold"), "threshold");
  if (label.threshold && !label.positive.empty()) {
    keys.fail("threshold", "[label] has either positive or threshold");
  }
  return label;
}

DenseColumn read_dense(const toml::table& table, const std::string& path) {
  const Keys keys(table, path, "[[dense]]", {"column", "log1p", "clip", "missing"});
  DenseColumn dense;
  dense.column = keys.text("column", /*is_needed=*/true);
  dense.log1p = keys.flag("log1p");
  if (const toml::node* clip = keys.find("clip")) {
    if (!clip->is_array() || clip->as_array()->size() != 2) {
      keys.fail(*clip, "clip is a list of two numbers, the lowest and the highest");
    }
    dense.low = keys.real((*clip->as_array())[0], "clip");
    dense.high = keys.real((*clip->as_array())[1], "clip");
    if (*dense.low > *dense.high) keys.fail(*clip, "clip has its lowest number above the highest");
  }
  if (const toml::node* missing = keys.find("missing")) {
    if (missing->is_string()) {
      keys.one_of("missing", {"error"});
      dense.missing.reset();
    } else {
      dense.missing = keys.real(*missing, "missing");
    }
  }
  return dense;
}

// Its values and one for all others; returns a value that stands there twice, or nothing.
std::string count_rows(FeatureColumn& feature) {
  feature.rows = static_cast<std::int64_t>(feature.values.size()) + 1;
  std::set<std::string_view> seen;
  for (const std::string& value : feature.values) {
    if (!seen.insert(value).second) return value;
  }
  return "";
}

FeatureColumn read_feature(const toml::table& table, const std::string& path) {
  const Keys keys(table, path, "[[feature]]",
                  {"column", "name", "kind", "rows", "growing", "dim", "vocabulary", "outside",
                   "separator", "most", "missing", "pooling", "values"});
  FeatureColumn feature;
  feature.column = keys.text("column", /*is_needed=*/true);
  feature.name = keys.text("name");
  const std::string kind = keys.one_of("kind", {"hash", "integer", "vocabulary"});
  feature.kind = kind == "hash"      ? IdKind::kHash
                 : kind == "integer" ? IdKind::kInteger
                                     : IdKind::kVocabulary;
  feature.rows = keys.whole("rows", 1, kMostRows);
  feature.grows = keys.flag("growing");
  feature.dim = keys.whole("dim", 1, kMostColumns);
  if (feature.grows) {
    for (const char* other : {"rows", "vocabulary", "values", "outside"}) {
      if (!keys.has(other)) continue;
      keys.fail(other, "feature '" + feature.column + "': growing = true and " + other +
                           " do not go together; a growing table takes every id");
    }
    if (feature.kind == IdKind::kVocabulary) {
      keys.fail("kind", "feature '" + feature.column +
                            "': growing = true is for kind = \"hash\" and \"integer\"");
    }
  }
  feature.vocabulary = keys.text("vocabulary");
  feature.values = keys.texts("values");
  if (keys.has("values")) {
    const std::string twice = count_rows(feature);
    if (!twice.empty()) keys.fail("values", "'" + twice + "' stands there twice");
  }
  const bool has_file = feature.kind == IdKind::kVocabulary;
  if (has_file != (!feature.vocabulary.empty() || keys.has("values"))) {
    keys.fail("vocabulary", "feature '" + feature.column +
                                "': kind = \"vocabulary\" and vocabulary = \"FILE\" go together");
  }
  if (!feature.vocabulary.empty() && keys.has("values")) {
    keys.fail("values", "feature '" + feature.column + "' has either vocabulary or values");
  }
  if (!feature.grows && has_file == keys.has("rows")) {
    keys.fail("rows", has_file
                          ? "feature '" + feature.column +
                                "': the rows of a vocabulary are the lines of its file, and "
                                "one; leave rows out"
                          : "feature '" + feature.column + "' needs rows = N, or growing = true");
  }
  feature.wraps = keys.one_of("outside", {"error", "wrap"}) == "wrap";
  feature.separator = keys.text("separator");
  feature.most = keys.whole("most", 1, std::int64_t{1} << 20);
  feature.empties = keys.one_of("missing", {"error", "empty"}) == "empty";
  feature.means = keys.one_of("pooling", {"sum", "mean"}) == "mean";
  return feature;
}

std::vector<const toml::table*> tables_of(const toml::table& all, const Keys& keys,
                                          const std::string& key) {
  std::vector<const toml::table*> tables;
  const toml::node* node = all.get(key);
  if (node == nullptr) return tables;
  const std::string say = "it is written as [[" + key + "]], once per column";
  if (!node->is_array()) keys.fail(*node, say);
  for (const auto& one : *node->as_array()) {
    if (!one.is_table()) keys.fail(one, say);
    tables.push_back(one.as_table());
  }
  return tables;
}

std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw DataError(path + ": cannot be read: " + std::strerror(errno) + ".");
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    if (line.ends_with('\r')) line.pop_back();
    lines.push_back(std::move(line));
  }
  return lines;
}

void read_vocabulary(FeatureColumn& feature, const std::string& schema_path) {
  const auto folder = std::filesystem::path(schema_path).parent_path();
  const std::string path = (folder / feature.vocabulary).string();
  feature.values = lines_of(path);
  const std::string twice = count_rows(feature);
  if (twice.empty()) return;
  const auto& all = feature.values;
  const auto first = std::find(all.begin(), all.end(), twice);
  const auto second = std::find(first + 1, all.end(), twice);
  throw DataError(path + ": line " + std::to_string(second - all.begin() + 1) + ": '" + twice +
                  "' stands there twice.");
}

void check_names(const Schema& schema, const std::string& path) {
  if (schema.features.empty()) {
    throw DataError(path + ": there is no [[feature]]; a recommender needs one or more.");
  }
  std::set<std::string> names;
  for (const FeatureColumn& feature : schema.features) {
    if (!names.insert(feature.feature()).second) {
      throw DataError(path + ": two features are named '" + feature.feature() +
                      "'. Give one of them name = \"...\".");
    }
  }
}

}  // namespace

dlrm::ClickSchema Schema::click_schema() const {
  dlrm::ClickSchema click;
  click.num_dense = static_cast<std::int64_t>(dense.size());
  for (const DenseColumn& one : dense) click.dense_names.push_back(one.column);
  for (const FeatureColumn& one : features) {
    click.features.push_back(
        {one.feature(), one.rows, one.is_single() ? 1 : 0, one.means, one.dim});
  }
  click.origin = text();
  return click;
}

std::string Schema::text() const {
  std::ostringstream out;
  const char* formats[] = {"", "csv", "tsv", "jsonl"};
  if (format != Format::kAny) {
    out << "format = \"" << formats[static_cast<int>(format)] << "\"\n";
  }
  if (separator != 0) out << "separator = " << quoted(std::string(1, separator)) << "\n";
  if (!columns.empty()) out << "columns = " << list_of(columns) << "\n";
  out << "missing = " << list_of(missing) << "\n\n[label]\ncolumn = " << quoted(label.column)
      << "\n";
  if (!label.positive.empty()) out << "positive = " << list_of(label.positive) << "\n";
  if (label.threshold) out << "threshold = " << number_of(*label.threshold) << "\n";
  for (const DenseColumn& one : dense) {
    out << "\n[[dense]]\ncolumn = " << quoted(one.column) << "\n";
    if (one.log1p) out << "log1p = true\n";
    if (one.low) out << "clip = [" << number_of(*one.low) << ", " << number_of(*one.high) << "]\n";
    out << "missing = " << (one.missing ? number_of(*one.missing) : "\"error\"") << "\n";
  }
  for (const FeatureColumn& one : features) {
    const char* kinds[] = {"integer", "hash", "vocabulary"};
    out << "\n[[feature]]\ncolumn = " << quoted(one.column) << "\n";
    if (!one.name.empty()) out << "name = " << quoted(one.name) << "\n";
    out << "kind = \"" << kinds[static_cast<int>(one.kind)] << "\"\n";
    if (one.kind == IdKind::kVocabulary) {
      // The values themselves, so that the schema means the same without the file.
      const bool is_read = !one.values.empty() || one.vocabulary.empty();
      out << (is_read ? "values = " + list_of(one.values)
                      : "vocabulary = " + quoted(one.vocabulary))
          << "\n";
    } else if (one.grows) {
      out << "growing = true\n";
    } else {
      out << "rows = " << one.rows << "\n";
    }
    if (one.dim > 0) out << "dim = " << one.dim << "\n";
    if (one.wraps) out << "outside = \"wrap\"\n";
    if (!one.separator.empty()) out << "separator = " << quoted(one.separator) << "\n";
    if (one.most > 0) out << "most = " << one.most << "\n";
    if (one.empties) out << "missing = \"empty\"\n";
    if (one.means) out << "pooling = \"mean\"\n";
  }
  return out.str();
}

Schema parse_schema(std::string_view text, const std::string& path) {
  toml::table all;
  try {
    all = toml::parse(text);
  } catch (const toml::parse_error& error) {
    throw DataError(path + ": line " + std::to_string(error.source().begin.line) + ": " +
                    std::string(error.description()) + ".");
  }
  const Keys keys(all, path, "a schema",
                  {"format", "separator", "columns", "missing", "label", "dense", "feature"});
  Schema schema;
  const std::string format = keys.one_of("format", {"any", "csv", "tsv", "jsonl"});
  schema.format = format == "csv"     ? Format::kCsv
                  : format == "tsv"   ? Format::kTsv
                  : format == "jsonl" ? Format::kJsonLines
                                      : Format::kAny;
  const std::string separator = keys.text("separator");
  if (separator.size() > 1 || separator == "\"" || separator == "\n" || separator == "\r") {
    keys.fail("separator", "separator is one character, and no quote or end of line");
  }
  if (!separator.empty()) schema.separator = separator[0];
  schema.columns = keys.texts("columns");
  if (keys.has("missing")) schema.missing = keys.texts("missing");
  const toml::node* label = keys.find("label");
  if (label == nullptr || !label->is_table()) {
    throw DataError(path + ": there is no [label] with column = \"...\".");
  }
  schema.label = read_label(*label->as_table(), path);
  for (const auto* one : tables_of(all, keys, "dense")) {
    schema.dense.push_back(read_dense(*one, path));
  }
  for (const auto* one : tables_of(all, keys, "feature")) {
    schema.features.push_back(read_feature(*one, path));
  }
  check_names(schema, path);
  return schema;
}

Schema read_schema(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw DataError(path + ": cannot be read: " + std::strerror(errno) + ".");
  std::ostringstream text;
  text << file.rdbuf();
  Schema schema = parse_schema(text.str(), path);
  for (FeatureColumn& feature : schema.features) {
    if (!feature.vocabulary.empty()) read_vocabulary(feature, path);
  }
  return schema;
}

}  // namespace tessera::workloads::data
