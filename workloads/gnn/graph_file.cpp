#include "gnn/graph_file.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/core/check.h"

namespace tessera::workloads::gnn {
namespace {

// Nodes without edges are allowed, up to so many.
constexpr std::int64_t kManyNodes = std::int64_t{1} << 24;
constexpr std::int64_t kNodesPerEdge = 64;

class Lines {
 public:
  explicit Lines(const std::string& path) : path_(path), file_(path) {
    TESSERA_CHECK_VALUE(file_.good(), "gnn.graph_file: ", path, " cannot be read.");
  }

  bool next(std::string& line) {
    if (!std::getline(file_, line)) return false;
    ++number_;
    return true;
  }

  // Goes on with the first line of the file.
  void rewind() {
    file_.clear();
    file_.seekg(0);
    number_ = 0;
  }

  [[noreturn]] void refuse(const std::string& why) const {
    TESSERA_CHECK_VALUE(false, "gnn.graph_file: ", path_, ", line ", number_, ": ", why);
  }

 private:
  std::string path_;
  std::ifstream file_;
  std::int64_t number_ = 0;
};

bool is_blank(const std::string& line) {
  return line.find_first_not_of(" \t\r") == std::string::npos || line[0] == '#';
}

// The text between the quotes of key="text"; empty if there is none.
std::string quoted(const std::string& line, const std::string& key) {
  const auto start = line.find(key + "=\"");
  if (start == std::string::npos) return "";
  const auto begin = start + key.size() + 2;
  return line.substr(begin, line.find('"', begin) - begin);
}

Box read_box(const Lines& lines, const std::string& comment) {
  std::istringstream numbers(quoted(comment, "Lattice"));
  std::vector<double> values;
  for (double value = 0; numbers >> value;) values.push_back(value);
  if (values.size() != 9) lines.refuse("there is no Lattice=\"...\" with nine numbers.");
  Box box;
  box.cell = at::tensor(values, at::kDouble).view({3, 3});
  if (!(std::abs(at::det(box.cell).item<double>()) > 0)) {
    lines.refuse("the lattice has no volume.");
  }
  const std::string periodic = quoted(comment, "pbc");
  if (!periodic.empty()) {
    std::istringstream words(periodic);
    std::string word;
    for (bool& is_periodic : box.is_periodic) {
      if (!(words >> word)) lines.refuse("pbc=\"...\" needs three letters, T or F.");
      is_periodic = word == "T" || word == "1" || word == "True";
    }
  }
  return box;
}

GraphFile read_atoms(Lines& lines, std::int64_t num_atoms) {
  std::string line;
  if (!lines.next(line)) lines.refuse("the file ends before the line with the lattice.");
  GraphFile graph;
  graph.num_nodes = num_atoms;
  graph.box = read_box(lines, line);
  std::vector<double> places;
  for (std::int64_t atom = 0; atom < num_atoms; ++atom) {
    if (!lines.next(line)) {
      lines.refuse("the file ends after " + std::to_string(atom) + " of " +
                   std::to_string(num_atoms) + " atoms.");
    }
    std::istringstream words(line);
    std::string name;
    double x = 0;
    double y = 0;
    double z = 0;
    if (!(words >> name >> x >> y >> z) || !std::isfinite(x + y + z)) {
      lines.refuse("an atom is a name and three coordinates, not '" + line + "'.");
    }
    places.insert(places.end(), {x, y, z});
  }
  graph.positions = at::tensor(places, at::kDouble).view({-1, 3});
  return graph;
}

GraphFile read_edges(Lines& lines) {
  GraphFile graph;
  std::vector<std::int64_t> sources;
  std::vector<std::int64_t> targets;
  for (std::string line; lines.next(line);) {
    if (is_blank(line)) continue;
    std::istringstream words(line);
    std::int64_t source = 0;
    std::int64_t target = 0;
    if (!(words >> source >> target) || source < 0 || target < 0) {
      lines.refuse("an edge is two node numbers, not '" + line + "'.");
    }
    sources.push_back(source);
    targets.push_back(target);
    graph.num_nodes = std::max({graph.num_nodes, source + 1, target + 1});
  }
  // A number that is out of all proportion is a mistake, and would ask for all memory there is.
  const auto most = std::max<std::int64_t>(kManyNodes, kNodesPerEdge * std::ssize(sources));
  if (graph.num_nodes > most) {
    lines.refuse("the file ends, and " + std::to_string(sources.size()) + " edges name node " +
                 std::to_string(graph.num_nodes - 1) +
                 ". Nodes are numbered from 0, without large gaps.");
  }
  graph.edge_index = at::stack({at::tensor(sources, at::kLong), at::tensor(targets, at::kLong)});
  return graph;
}

}  // namespace

GraphFile read_graph_file(const std::string& path) {
  Lines lines(path);
  std::string line;
  do {
    if (!lines.next(line)) lines.refuse("the file is empty.");
  } while (is_blank(line));
  std::istringstream words(line);
  std::int64_t first = 0;
  std::int64_t second = 0;
  if (!(words >> first)) lines.refuse("a number is expected: of atoms, or of a node.");
  if (words >> second) {
    lines.rewind();
    return read_edges(lines);
  }
  if (first <= 0) lines.refuse("a file of atoms starts with their number.");
  return read_atoms(lines, first);
}

}  // namespace tessera::workloads::gnn
