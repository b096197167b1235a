#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

#include <ATen/ATen.h>

#include "gnn/graph_file.h"
#include "gnn/partitioner.h"
#include "gnn/structure.h"
#include "support/ranks.h"
#include "tessera/graph_parallel/halo_plan.h"
#include "tessera/graph_parallel/partition_report.h"

namespace tessera::workloads::gnn {
namespace {

// A file of the test's own, gone with it.
class TextFile {
 public:
  explicit TextFile(const std::string& text)
      : path_(::testing::TempDir() + "graph-" +
              ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::ofstream(path_) << text;
  }
  ~TextFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string text_of_reading(const std::string& text) {
  const TextFile file(text);
  try {
    read_graph_file(file.path());
  } catch (const c10::ValueError& error) {
    const std::string message = error.what_without_backtrace();
    return message.substr(message.find(", line"));
  }
  return "";
}

TEST(GraphFiles, AtomsAreRead) {
  const TextFile file(
      "2\nLattice=\"4 0 0 0 5 0 0 0 6\" Properties=species:S:1:pos:R:3 pbc=\"T F T\"\n"
      "O 0.5 1 2\nH 3 4 5.5\n");
  const GraphFile graph = read_graph_file(file.path());
  EXPECT_EQ(graph.num_nodes, 2);
  EXPECT_EQ(graph.positions[1][2].item<double>(), 5.5);
  EXPECT_EQ(graph.box.cell[1][1].item<double>(), 5);
  EXPECT_EQ(graph.box.is_periodic, (std::array<bool, 3>{true, false, true}));
  EXPECT_FALSE(graph.edge_index.defined());
}

TEST(GraphFiles, EdgesAreRead) {
  const TextFile file("# a comment\n0 3\n\n3 1\n");
  const GraphFile graph = read_graph_file(file.path());
  EXPECT_EQ(graph.num_nodes, 4);
  EXPECT_TRUE(at::equal(graph.edge_index, at::tensor({0, 3, 3, 1}, at::kLong).view({2, 2})));
}

TEST(GraphFiles, MistakesAreNamedByLine) {
  EXPECT_EQ(text_of_reading(""), ", line 0: the file is empty.");
  EXPECT_EQ(text_of_reading("1 2\n3 x\n"), ", line 2: an edge is two node numbers, not '3 x'.");
  EXPECT_EQ(text_of_reading("1 2\n3 -1\n"), ", line 2: an edge is two node numbers, not '3 -1'.");
  EXPECT_EQ(text_of_reading("2\nno lattice\n"),
            ", line 2: there is no Lattice=\"...\" with nine numbers.");
  EXPECT_EQ(text_of_reading("1\nLattice=\"1 0 0 1 0 0 0 0 1\"\nH 0 0 0\n"),
            ", line 2: the lattice has no volume.");
  EXPECT_EQ(text_of_reading("2\nLattice=\"1 0 0 0 1 0 0 0 1\"\nH 0 0 0\n"),
            ", line 3: the file ends after 1 of 2 atoms.");
  EXPECT_EQ(text_of_reading("1\nLattice=\"1 0 0 0 1 0 0 0 1\"\nH 0 zero 0\n"),
            ", line 3: an atom is a name and three coordinates, not 'H 0 zero 0'.");
  EXPECT_EQ(text_of_reading("0\n"), ", line 1: a file of atoms starts with their number.");
  EXPECT_THROW(read_graph_file("/nowhere/at/all"), c10::ValueError);
}

TEST(PartitionReports, CountWhatPlansHave) {
  const Structure structure = make_structure({.num_atoms = 60, .cutoff = 1.7}, 3);
  const at::Tensor& edges = structure.neighbours.edge_index;
  const auto partition = make_partition("bisection", structure.positions, structure.box, edges, 4);
  const auto report = graph_parallel::report_of(partition, edges);
  tessera::testing::run_ranks(4, [&](const comm::Group& group) {
    const at::Tensor mine = graph_parallel::edges_of_part(edges, partition, group.rank());
    const graph_parallel::HaloPlan plan(partition, edges.index_select(1, mine), group);
    const auto& part = report.parts[group.rank()];
    EXPECT_EQ(part.num_owned, plan.num_owned());
    EXPECT_EQ(part.num_halo, plan.num_halo());
    EXPECT_EQ(part.num_sent, plan.num_sent());
    EXPECT_EQ(part.num_interior, plan.interior().size(0));
    EXPECT_EQ(part.num_boundary, plan.boundary().size(0));
  });
  EXPECT_GE(static_cast<double>(report.largest_halo()), report.mean_halo());
  EXPECT_GE(report.edge_imbalance(), 1.0);
}

}  // namespace
}  // namespace tessera::workloads::gnn
