#include "gnn/own_structures.h"

#include <algorithm>
#include <set>

#include <ATen/ATen.h>

#include "data/input.h"
#include "trainer/data_error.h"

namespace tessera::workloads::gnn {
namespace {

using trainer::DataError;

std::vector<XyzFrame> read_files(const std::string& names, const XyzKeys& keys) {
  std::vector<std::string> files;
  for (std::size_t begin = 0; begin <= names.size();) {
    const std::size_t end = std::min(names.find(',', begin), names.size());
    if (end > begin) files.push_back(names.substr(begin, end - begin));
    begin = end + 1;
  }
  std::vector<XyzFrame> all;
  for (const std::string& file : data::expand(files)) {
    std::vector<XyzFrame> some = read_extended_xyz(file, keys);
    for (std::size_t i = 0; i < some.size(); ++i) {
      if (some[i].energy || !some[i].forces.empty()) continue;
      throw DataError(file + ": structure " + std::to_string(i + 1) + " has neither " +
                      keys.energy + " nor " + keys.forces +
                      ". Name what it has with --energy-key and --forces-key.");
    }
    std::move(some.begin(), some.end(), std::back_inserter(all));
  }
  return all;
}

std::int64_t type_of(const OwnStructures& all, const std::string& species) {
  const auto found = std::lower_bound(all.species.begin(), all.species.end(), species);
  return found - all.species.begin();
}

void find_species(OwnStructures& all) {
  std::set<std::string> known;
  for (const auto* frames : {&all.training, &all.judged}) {
    for (const XyzFrame& frame : *frames) known.insert(frame.species.begin(), frame.species.end());
  }
  all.species.assign(known.begin(), known.end());
}

void find_atomic_energies(OwnStructures& all) {
  const auto num_types = static_cast<std::int64_t>(all.species.size());
  std::vector<double> counts;
  std::vector<double> energies;
  for (const XyzFrame& frame : all.training) {
    if (!frame.energy) continue;
    std::vector<double> row(all.species.size(), 0.0);
    for (const std::string& one : frame.species)
      row[static_cast<std::size_t>(type_of(all, one))] += 1;
    counts.insert(counts.end(), row.begin(), row.end());
    energies.push_back(*frame.energy);
  }
  all.atomic_energies.assign(all.species.size(), 0.0);
  if (energies.empty()) return;
  const at::Tensor a = at::tensor(counts, at::kDouble).view({-1, num_types});
  const at::Tensor b = at::tensor(energies, at::kDouble).unsqueeze(1);
  // The least of all solutions where the structures do not tell species apart.
  const at::Tensor x = std::get<0>(at::linalg_lstsq(a, b, std::nullopt, "gelsd")).contiguous();
  std::copy_n(x.const_data_ptr<double>(), num_types, all.atomic_energies.begin());
}

}  // namespace

double OwnStructures::mean_atoms() const {
  double sum = 0;
  for (const XyzFrame& frame : training) sum += static_cast<double>(frame.num_atoms());
  return sum / static_cast<double>(std::max<std::size_t>(1, training.size()));
}

OwnStructures read_structures(const Settings& settings) {
  const XyzKeys keys{settings.energy_key, settings.forces_key, settings.stress_key};
  OwnStructures all;
  all.training = read_files(settings.data, keys);
  if (!settings.eval_data.empty()) {
    all.judged = read_files(settings.eval_data, keys);
  } else if (all.training.size() > 1) {
    const auto num_judged =
        static_cast<std::ptrdiff_t>(std::max<std::size_t>(1, all.training.size() / 10));
    std::move(all.training.end() - num_judged, all.training.end(), std::back_inserter(all.judged));
    all.training.erase(all.training.end() - num_judged, all.training.end());
  } else {
    throw DataError(settings.data +
                    ": holds one structure; one more is needed to judge on, here or " +
                    "by --eval-data.");
  }
  find_species(all);
  find_atomic_energies(all);
  return all;
}

Structure structure_of(const XyzFrame& frame, const OwnStructures& all, double cutoff) {
  Structure structure;
  const std::int64_t num_atoms = frame.num_atoms();
  structure.positions = at::tensor(frame.positions, at::kDouble).view({num_atoms, 3});
  structure.box.is_periodic = frame.is_periodic;
  if (frame.cell) {
    const std::vector<double> cell(frame.cell->begin(), frame.cell->end());
    structure.box.cell = at::tensor(cell, at::kDouble).view({3, 3});
  } else {
    // Nothing repeats; a box of any size around them.
    const at::Tensor extent =
        std::get<0>(structure.positions.max(0)) - std::get<0>(structure.positions.min(0));
    structure.box.cell = at::diag(extent + 2 * cutoff);
  }
  std::vector<std::int64_t> types;
  double lone = 0;
  for (const std::string& one : frame.species) {
    types.push_back(type_of(all, one));
    lone += all.atomic_energies[static_cast<std::size_t>(types.back())];
  }
  structure.types = at::tensor(types, at::kLong);
  if (frame.energy) structure.energy = at::scalar_tensor(*frame.energy - lone, at::kDouble);
  if (!frame.forces.empty()) {
    structure.forces = at::tensor(frame.forces, at::kDouble).view({num_atoms, 3});
  }
  if (frame.stress) {
    const std::vector<double> stress(frame.stress->begin(), frame.stress->end());
    structure.stress = at::tensor(stress, at::kDouble).view({3, 3});
  }
  structure.neighbours = within(structure.positions, structure.box, cutoff);
  return structure;
}

}  // namespace tessera::workloads::gnn
