#include "gnn/extended_xyz.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <string_view>

#include "trainer/data_error.h"

namespace tessera::workloads::gnn {
namespace {

using trainer::DataError;

constexpr std::int64_t kMostAtoms = 1 << 28;

/// A column of the lines of atoms.
struct Property {
  std::string name;
  char kind;          // S, R, I, L
  std::size_t first;  // word of the line
  std::size_t count;
};

class Reader {
 public:
  Reader(const std::string& path, const XyzKeys& keys) : path_(path), keys_(keys), file_(path) {
    if (!file_) throw DataError(path + ": cannot be opened: " + std::strerror(errno) + ".");
  }

  std::vector<XyzFrame> all() {
    std::vector<XyzFrame> frames;
    std::string text;
    while (next(text)) {
      if (words_of(text).empty()) continue;  // between structures, and at the end
      frames.push_back(frame(text));
    }
    if (frames.empty()) throw DataError(path_ + ": holds no structure.");
    return frames;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw DataError(path_ + ": line " + std::to_string(line_) + ": " + what + ".");
  }

  bool next(std::string& text) {
    if (!std::getline(file_, text)) return false;
    if (text.ends_with('\r')) text.pop_back();
    ++line_;
    return true;
  }

  static std::vector<std::string_view> words_of(std::string_view text) {
    std::vector<std::string_view> words;
    for (std::size_t place = 0; place < text.size();) {
      const std::size_t begin = text.find_first_not_of(" \t", place);
      if (begin == std::string_view::npos) break;
      const std::size_t end = std::min(text.find_first_of(" \t", begin), text.size());
      words.push_back(text.substr(begin, end - begin));
      place = end;
    }
    return words;
  }

  double real(std::string_view word) const {
    double value = 0;
    if (word.starts_with('+')) word.remove_prefix(1);
    const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc() || stop != word.data() + word.size()) {
      fail("'" + std::string(word) + "' is not a number");
    }
    if (!std::isfinite(value)) fail("'" + std::string(word) + "' is not a finite number");
    return value;
  }

  // key=value pairs; values in quotes, braces or brackets may hold spaces.
  std::map<std::string, std::string> pairs_of(std::string_view text) const {
    std::map<std::string, std::string> pairs;
    std::size_t at = 0;
    while ((at = text.find_first_not_of(" \t", at)) != std::string_view::npos) {
      const std::size_t key_end = std::min(text.find_first_of("= \t", at), text.size());
      const std::string key(text.substr(at, key_end - at));
      at = key_end;
      if (at >= text.size() || text[at] != '=') {
        pairs[key] = "T";  // a key alone is a flag
        continue;
      }
      ++at;
      const std::string_view opens = "\"'{[";
      const std::string_view closes = "\"'}]";
      const std::size_t kind = at < text.size() ? opens.find(text[at]) : std::string_view::npos;
      if (kind == std::string_view::npos) {
        const std::size_t end = std::min(text.find_first_of(" \t", at), text.size());
        pairs[key] = text.substr(at, end - at);
        at = end;
        continue;
      }
      const std::size_t end = text.find(closes[kind], at + 1);
      if (end == std::string_view::npos) fail("the value of " + key + " has no end");
      pairs[key] = text.substr(at + 1, end - at - 1);
      at = end + 1;
    }
    return pairs;
  }

  std::vector<double> reals(const std::string& text, const std::string& key) const {
    std::vector<double> values;
    std::string plain = text;
    for (char& c : plain) c = c == ',' || c == '[' || c == ']' ? ' ' : c;
    for (const std::string_view word : words_of(plain)) values.push_back(real(word));
    if (values.empty()) fail(key + " has no numbers");
    return values;
  }

  std::vector<Property> properties_of(const std::map<std::string, std::string>& pairs) const {
    const auto found = pairs.find("Properties");
    if (found == pairs.end()) return {{"species", 'S', 0, 1}, {"pos", 'R', 1, 3}};
    std::vector<std::string> parts;
    const std::string& text = found->second;
    for (std::size_t begin = 0; begin <= text.size();) {
      const std::size_t end = std::min(text.find(':', begin), text.size());
      parts.push_back(text.substr(begin, end - begin));
      begin = end + 1;
    }
    std::vector<Property> properties;
    std::size_t first = 0;
    for (std::size_t i = 0; i + 2 < parts.size(); i += 3) {
      const auto count = static_cast<std::size_t>(real(parts[i + 2]));
      if (parts[i + 1].size() != 1 || count < 1 || count > 1000) {
        fail("Properties has '" + parts[i] + ":" + parts[i + 1] + ":" + parts[i + 2] + "'");
      }
      properties.push_back({parts[i], parts[i + 1][0], first, count});
      first += count;
    }
    if (parts.size() % 3 != 0 || properties.empty()) fail("Properties are names, kinds and counts");
    return properties;
  }

  const Property* find(const std::vector<Property>& properties, const std::string& name,
                       std::size_t count) const {
    for (const Property& one : properties) {
      if (one.name != name) continue;
      if (one.count != count) {
        fail(name + " has " + std::to_string(one.count) + " columns, not " + std::to_string(count));
      }
      return &one;
    }
    return nullptr;
  }

  static double volume_of(const std::array<double, 9>& c) {
    return std::abs(c[0] * (c[4] * c[8] - c[5] * c[7]) - c[1] * (c[3] * c[8] - c[5] * c[6]) +
                    c[2] * (c[3] * c[7] - c[4] * c[6]));
  }

  std::array<double, 9> tensor(const std::string& text, const std::string& key) const {
    const std::vector<double> v = reals(text, key);
    if (v.size() == 9) return {v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8]};
    if (v.size() != 6) fail(key + " has " + std::to_string(v.size()) + " numbers, not 9 or 6");
    // Voigt's order: xx, yy, zz, yz, xz, xy.
    return {v[0], v[5], v[4], v[5], v[1], v[3], v[4], v[3], v[2]};
  }

  void read_pairs(const std::map<std::string, std::string>& pairs, XyzFrame& frame) const {
    const auto value = [&](const std::string& key) {
      const auto found = pairs.find(key);
      return found == pairs.end() ? nullptr : &found->second;
    };
    if (const std::string* lattice = value("Lattice")) {
      const std::vector<double> numbers = reals(*lattice, "Lattice");
      if (numbers.size() != 9)
        fail("Lattice has " + std::to_string(numbers.size()) + " numbers, not 9");
      frame.cell.emplace();
      std::copy(numbers.begin(), numbers.end(), frame.cell->begin());
      if (!(volume_of(*frame.cell) > 0)) fail("Lattice has no volume");
      frame.is_periodic = {true, true, true};
    }
    if (const std::string* pbc = value("pbc")) {
      const auto words = words_of(*pbc);
      if (words.size() != 3) fail("pbc has three values");
      for (std::size_t i = 0; i < 3; ++i) {
        frame.is_periodic[i] = words[i] == "T" || words[i] == "True" || words[i] == "1";
        if (frame.is_periodic[i] && !frame.cell) fail("pbc repeats a box that has no Lattice");
      }
    }
    if (const std::string* energy = value(keys_.energy)) frame.energy = real(*energy);
    if (const std::string* stress = value(keys_.stress)) {
      if (!frame.cell) fail(keys_.stress + " is of a box; there is no Lattice");
      frame.stress = tensor(*stress, keys_.stress);
    } else if (const std::string* virial = value("virial"); virial != nullptr && frame.cell) {
      frame.stress = tensor(*virial, "virial");
      for (double& one : *frame.stress) one /= -volume_of(*frame.cell);
    }
  }

  XyzFrame frame(std::string_view first) {
    std::int64_t num_atoms = 0;
    const auto words = words_of(first);
    const char* end = words[0].data() + words[0].size();
    const auto [stop, error] = std::from_chars(words[0].data(), end, num_atoms);
    if (words.size() != 1 || error != std::errc() || stop != end || num_atoms < 1 ||
        num_atoms > kMostAtoms) {
      fail("'" + std::string(first.substr(0, 40)) + "' is not a number of atoms");
    }
    std::string text;
    if (!next(text)) fail("a structure has no second line");
    XyzFrame frame;
    const auto pairs = pairs_of(text);
    read_pairs(pairs, frame);
    const std::vector<Property> properties = properties_of(pairs);
    const Property* species = find(properties, "species", 1);
    const Property* places = find(properties, "pos", 3);
    const Property* forces = find(properties, keys_.forces, 3);
    if (species == nullptr || places == nullptr) fail("Properties has no species or no pos");
    const std::size_t width = properties.back().first + properties.back().count;
    for (std::int64_t atom = 0; atom < num_atoms; ++atom) {
      if (!next(text)) {
        fail("the file ends after " + std::to_string(atom) + " of " + std::to_string(num_atoms) +
             " atoms");
      }
      const auto cells = words_of(text);
      if (cells.size() < width) {
        fail("an atom has " + std::to_string(cells.size()) + " values; Properties has " +
             std::to_string(width));
      }
      frame.species.emplace_back(cells[species->first]);
      for (std::size_t i = 0; i < 3; ++i) frame.positions.push_back(real(cells[places->first + i]));
      for (std::size_t i = 0; forces != nullptr && i < 3; ++i) {
        frame.forces.push_back(real(cells[forces->first + i]));
      }
    }
    return frame;
  }

  const std::string& path_;
  const XyzKeys& keys_;
  std::ifstream file_;
  std::int64_t line_ = 0;
};

}  // namespace

std::string extended_xyz(const XyzFrame& frame) {
  std::string text = std::to_string(frame.num_atoms()) + "\n";
  char word[64];
  const auto put = [&](double value) {
    text.append(word, std::to_chars(word, word + sizeof(word), value).ptr);
  };
  const auto put_all = [&](const char* begin, const std::array<double, 9>& values) {
    text += begin;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i > 0) text += ' ';
      put(values[i]);
    }
    text += "\" ";
  };
  if (frame.cell) put_all("Lattice=\"", *frame.cell);
  text += "Properties=species:S:1:pos:R:3";
  if (!frame.forces.empty()) text += ":forces:R:3";
  text += ' ';
  if (frame.energy) {
    text += "energy=";
    put(*frame.energy);
    text += ' ';
  }
  if (frame.stress) put_all("stress=\"", *frame.stress);
  text += "pbc=\"";
  for (const bool repeats : frame.is_periodic) text += repeats ? "T " : "F ";
  text.back() = '"';
  text += '\n';
  for (std::size_t atom = 0; atom < frame.species.size(); ++atom) {
    text += frame.species[atom];
    for (const auto* values : {&frame.positions, &frame.forces}) {
      for (std::size_t i = 3 * atom; i < std::min(values->size(), 3 * atom + 3); ++i) {
        text += ' ';
        put((*values)[i]);
      }
    }
    text += '\n';
  }
  return text;
}

std::vector<XyzFrame> read_extended_xyz(const std::string& path, const XyzKeys& keys) {
  return Reader(path, keys).all();
}

}  // namespace tessera::workloads::gnn
