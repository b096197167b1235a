#include "gnn/neighbours.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/core/check.h"

namespace tessera::workloads::gnn {
namespace {

using Vector = std::array<double, 3>;
using Cell = std::array<std::int64_t, 3>;

struct Found {
  double squared;
  std::int64_t source;
  Cell shift;
};

// Atoms in bins of about a cutoff's size, so that only nearby bins are searched.
class Bins {
 public:
  Bins(const at::Tensor& positions, const Box& box, double cutoff) : cutoff_(cutoff) {
    const at::Tensor cell = box.cell.to(at::kDouble).contiguous();
    std::copy_n(cell.const_data_ptr<double>(), 9, &lattice_[0][0]);
    const at::Tensor inverse = at::linalg_inv(cell);
    const at::Tensor fractions = positions.detach().to(at::kDouble).matmul(inverse).contiguous();
    const double* fraction = fractions.const_data_ptr<double>();
    num_atoms_ = positions.size(0);
    is_periodic_ = box.is_periodic;
    for (int axis = 0; axis < 3; ++axis) {
      low_[axis] = 0;
      double high = 1;
      if (!is_periodic_[axis] && num_atoms_ > 0) {
        const at::Tensor along = fractions.select(1, axis);
        low_[axis] = along.min().item<double>();
        high = along.max().item<double>() + 1e-9;
      }
      width_[axis] = high - low_[axis];
      // The distance between the faces across this axis.
      const double height = width_[axis] / inverse.select(1, axis).norm().item<double>();
      num_[axis] = std::clamp<std::int64_t>(static_cast<std::int64_t>(height / cutoff), 1, 512);
      reach_[axis] =
          static_cast<std::int64_t>(std::ceil(cutoff * static_cast<double>(num_[axis]) / height));
      if (!is_periodic_[axis]) reach_[axis] = std::min(reach_[axis], num_[axis]);
    }
    fill(fraction);
  }

  std::int64_t num_atoms() const { return num_atoms_; }

  // Calls `visit` for every image within the cutoff of `atom`.
  template <class Visit>
  void around(std::int64_t atom, const Visit& visit) const {
    const Cell bin = bin_of(atom);
    Cell step;
    for (step[0] = -reach_[0]; step[0] <= reach_[0]; ++step[0]) {
      for (step[1] = -reach_[1]; step[1] <= reach_[1]; ++step[1]) {
        for (step[2] = -reach_[2]; step[2] <= reach_[2]; ++step[2])
          visit_bin(atom, bin, step, visit);
      }
    }
  }

 private:
  void fill(const double* fraction) {
    wrapped_.resize(num_atoms_);
    turns_.resize(num_atoms_);
    first_.assign(num_[0] * num_[1] * num_[2] + 1, 0);
    for (std::int64_t atom = 0; atom < num_atoms_; ++atom) {
      for (int axis = 0; axis < 3; ++axis) {
        const double value = fraction[3 * atom + axis];
        turns_[atom][axis] = is_periodic_[axis] ? static_cast<std::int64_t>(std::floor(value)) : 0;
        wrapped_[atom][axis] = value - static_cast<double>(turns_[atom][axis]);
      }
      ++first_[index_of(bin_of(atom)) + 1];
    }
    for (std::size_t bin = 1; bin < first_.size(); ++bin) first_[bin] += first_[bin - 1];
    members_.resize(num_atoms_);
    auto next = first_;
    for (std::int64_t atom = 0; atom < num_atoms_; ++atom) {
      members_[next[index_of(bin_of(atom))]++] = atom;
    }
  }

  Cell bin_of(std::int64_t atom) const {
    Cell bin;
    for (int axis = 0; axis < 3; ++axis) {
      const double place = (wrapped_[atom][axis] - low_[axis]) / width_[axis];
      bin[axis] = std::clamp<std::int64_t>(
          static_cast<std::int64_t>(place * static_cast<double>(num_[axis])), 0, num_[axis] - 1);
    }
    return bin;
  }

  std::int64_t index_of(const Cell& bin) const {
    return (bin[0] * num_[1] + bin[1]) * num_[2] + bin[2];
  }

  template <class Visit>
  void visit_bin(std::int64_t atom, const Cell& bin, const Cell& step, const Visit& visit) const {
    Cell other;
    Cell image;
    for (int axis = 0; axis < 3; ++axis) {
      other[axis] = bin[axis] + step[axis];
      image[axis] = other[axis] >= 0 ? other[axis] / num_[axis]
                                     : -((num_[axis] - 1 - other[axis]) / num_[axis]);
      other[axis] -= image[axis] * num_[axis];
      if (image[axis] != 0 && !is_periodic_[axis]) return;
    }
    const std::int64_t index = index_of(other);
    for (std::int64_t i = first_[index]; i < first_[index + 1]; ++i) {
      const std::int64_t source = members_[i];
      if (source == atom && image == Cell{0, 0, 0}) continue;
      Vector fraction;
      for (int axis = 0; axis < 3; ++axis) {
        fraction[axis] =
            wrapped_[source][axis] + static_cast<double>(image[axis]) - wrapped_[atom][axis];
      }
      double squared = 0;
      for (int axis = 0; axis < 3; ++axis) {
        const double length = fraction[0] * lattice_[0][axis] + fraction[1] * lattice_[1][axis] +
                              fraction[2] * lattice_[2][axis];
        squared += length * length;
      }
      if (squared >= cutoff_ * cutoff_) continue;
      Cell shift;
      for (int axis = 0; axis < 3; ++axis) {
        shift[axis] = image[axis] - turns_[source][axis] + turns_[atom][axis];
      }
      visit(Found{squared, source, shift});
    }
  }

  double cutoff_;
  double lattice_[3][3];
  std::int64_t num_atoms_ = 0;
  std::array<bool, 3> is_periodic_{};
  Vector low_{};
  Vector width_{};
  Cell num_{};
  Cell reach_{};
  std::vector<Vector> wrapped_;
  std::vector<Cell> turns_;
  std::vector<std::int64_t> first_;
  std::vector<std::int64_t> members_;
};

struct EdgeList {
  std::vector<std::int64_t> sources;
  std::vector<std::int64_t> targets;
  std::vector<double> shifts;

  void add(const Found& found, std::int64_t target) {
    sources.push_back(found.source);
    targets.push_back(target);
    for (const std::int64_t shift : found.shift) shifts.push_back(static_cast<double>(shift));
  }

  Neighbours finish() const {
    return {at::stack({at::tensor(sources, at::kLong), at::tensor(targets, at::kLong)}),
            at::tensor(shifts, at::kDouble).view({-1, 3})};
  }
};

void check(const at::Tensor& positions, const Box& box) {
  TESSERA_CHECK_VALUE(positions.dim() == 2 && positions.size(1) == 3,
                      "gnn.neighbours: the positions have shape ", positions.sizes(),
                      ", not [atoms, 3].");
  TESSERA_CHECK_VALUE(box.cell.dim() == 2 && box.cell.size(0) == 3 && box.cell.size(1) == 3,
                      "gnn.neighbours: the cell has shape ", box.cell.sizes(), ", not [3, 3].");
}

}  // namespace

Neighbours within(const at::Tensor& positions, const Box& box, double cutoff) {
  check(positions, box);
  TESSERA_CHECK_VALUE(cutoff > 0, "gnn.neighbours: the cutoff is ", cutoff, ", not positive.");
  const Bins bins(positions, box, cutoff);
  EdgeList edges;
  for (std::int64_t atom = 0; atom < bins.num_atoms(); ++atom) {
    bins.around(atom, [&](const Found& found) { edges.add(found, atom); });
  }
  return edges.finish();
}

Neighbours nearest(const at::Tensor& positions, const Box& box, std::int64_t count) {
  check(positions, box);
  TESSERA_CHECK_VALUE(count > 0 && positions.size(0) > 0, "gnn.neighbours: ", count, " nearest of ",
                      positions.size(0), " atoms cannot be found.");
  const double volume = std::abs(at::det(box.cell.to(at::kDouble)).item<double>());
  // Room for twice as many as asked for at even density; more where that was not enough.
  double cutoff = std::cbrt(2.0 * static_cast<double>(count) * volume /
                            static_cast<double>(positions.size(0)) / (4.0 / 3.0 * M_PI));
  for (;; cutoff *= 1.3) {
    const Bins bins(positions, box, cutoff);
    EdgeList edges;
    std::vector<Found> found;
    bool is_enough = true;
    for (std::int64_t atom = 0; atom < bins.num_atoms() && is_enough; ++atom) {
      found.clear();
      bins.around(atom, [&](const Found& one) { found.push_back(one); });
      is_enough = static_cast<std::int64_t>(found.size()) >= count;
      if (!is_enough) break;
      std::partial_sort(
          found.begin(), found.begin() + count, found.end(), [](const Found& a, const Found& b) {
            return std::tie(a.squared, a.source, a.shift) < std::tie(b.squared, b.source, b.shift);
          });
      for (std::int64_t i = 0; i < count; ++i) edges.add(found[i], atom);
    }
    if (is_enough) return edges.finish();
  }
}

}  // namespace tessera::workloads::gnn
