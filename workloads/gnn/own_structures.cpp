#include "gnn/own_structures.h"

#include <algorithm>
#include <set>

#include <ATen/ATen.h>

#include "data/input.h"
#include "trainer/data_error.h"

namespace tessera::workloads::gnn {
namespace {

using trainer::DataError;

XyzKeys keys_of(const Settings& settings) {
  return {settings.energy_key, settings.forces_key, settings.stress_key};
}

std::vector<XyzFrame> read_files(const std::vector<std::string>& files, const XyzKeys& keys,
                                 bool needs_labels = true) {
  std::vector<XyzFrame> all;
  for (const std::string& file : files) {
    std::vector<XyzFrame> some = read_extended_xyz(file, keys);
    for (std::size_t i = 0; needs_labels && i < some.size(); ++i) {
      if (some[i].energy || !some[i].forces.empty()) continue;
      throw DataError(file + ": structure " + std::to_string(i + 1) + " has neither " +
                      keys.energy + " nor " + keys.forces +
                      ". Name what it has with --energy-key and --forces-key.");
    }
    std::move(some.begin(), some.end(), std::back_inserter(all));
  }
  return all;
}

struct Labels {
  std::int64_t energies = 0;
  std::int64_t forces = 0;
  std::int64_t stress = 0;
};

Labels labels_of(const std::vector<XyzFrame>& frames) {
  Labels labels;
  for (const XyzFrame& frame : frames) {
    labels.energies += frame.energy ? 1 : 0;
    labels.forces += frame.forces.empty() ? 0 : 1;
    labels.stress += frame.stress ? 1 : 0;
  }
  return labels;
}

// A key of one's own that no structure has is mistyped; nothing would be learned of it.
void check_labels(const Settings& settings, const std::vector<XyzFrame>& frames) {
  const Labels labels = labels_of(frames);
  const XyzKeys usual;
  const auto check = [&](const std::string& flag, const std::string& key, const std::string& other,
                         std::int64_t count) {
    if (count > 0 || key == other) return;
    throw DataError(settings.data + ": no structure to train on has '" + key + "', which " + flag +
                    " names.");
  };
  check("--energy-key", settings.energy_key, usual.energy, labels.energies);
  check("--forces-key", settings.forces_key, usual.forces, labels.forces);
  check("--stress-key", settings.stress_key, usual.stress, labels.stress);
  if (settings.stress_weight > 0 && labels.stress == 0) {
    throw DataError(settings.data + ": no structure to train on has '" + settings.stress_key +
                    "' or a virial, so --stress-weight has nothing to weigh. Name what they have "
                    "with --stress-key, or leave --stress-weight out.");
  }
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
  std::vector<at::Tensor> counts;
  std::vector<double> energies;
  for (const XyzFrame& frame : all.training) {
    if (!frame.energy) continue;
    counts.push_back(counts_of(frame, all));
    energies.push_back(*frame.energy);
  }
  all.atomic_energies = at::zeros({num_types}, at::kDouble);
  if (energies.empty()) return;
  const at::Tensor b = at::tensor(energies, at::kDouble).unsqueeze(1);
  // The least of all solutions where the structures do not tell species apart.
  all.atomic_energies = std::get<0>(at::linalg_lstsq(at::stack(counts), b, std::nullopt, "gelsd"))
                            .squeeze(1)
                            .contiguous();
}

}  // namespace

std::string labels_text(const std::vector<XyzFrame>& frames) {
  const Labels labels = labels_of(frames);
  std::string text;
  for (const auto& [name, count] : {std::pair{"energies", labels.energies},
                                    {"forces", labels.forces},
                                    {"stress", labels.stress}}) {
    if (count == 0) continue;
    text += (text.empty() ? "" : ", ") + std::string(name) + " of " + std::to_string(count);
  }
  return text;
}

std::string unseen_species(const OwnStructures& all) {
  std::set<std::string> unseen(all.species.begin(), all.species.end());
  for (const XyzFrame& frame : all.training) {
    for (const std::string& one : frame.species) unseen.erase(one);
  }
  std::string text;
  for (const std::string& one : unseen) text += (text.empty() ? "" : ", ") + one;
  return text;
}

double OwnStructures::mean_atoms() const {
  double sum = 0;
  for (const XyzFrame& frame : training) sum += static_cast<double>(frame.num_atoms());
  return sum / static_cast<double>(std::max<std::size_t>(1, training.size()));
}

OwnStructures read_structures(const Settings& settings) {
  const XyzKeys keys = keys_of(settings);
  OwnStructures all;
  all.files = data::files_of(settings.data);
  all.training = read_files(all.files, keys);
  if (!settings.eval_data.empty()) {
    const std::vector<std::string> others = data::files_of(settings.eval_data);
    all.judged = read_files(others, keys);
    all.files.insert(all.files.end(), others.begin(), others.end());
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
  check_labels(settings, all.training);
  find_species(all);
  find_atomic_energies(all);
  return all;
}

OwnStructures read_to_judge(const Settings& settings, const std::string& data,
                            std::vector<std::string> species, bool needs_labels) {
  OwnStructures all;
  all.species = std::move(species);
  all.files = data::files_of(data);
  all.judged = read_files(all.files, keys_of(settings), needs_labels);
  for (std::size_t i = 0; i < all.judged.size(); ++i) {
    for (const std::string& one : all.judged[i].species) {
      if (std::binary_search(all.species.begin(), all.species.end(), one)) continue;
      throw DataError(data + ": structure " + std::to_string(i + 1) + " has an atom of " + one +
                      ", which the model has not seen.");
    }
  }
  all.atomic_energies = at::zeros({std::ssize(all.species)}, at::kDouble);
  return all;
}

at::Tensor counts_of(const XyzFrame& frame, const OwnStructures& all) {
  at::Tensor counts = at::zeros({std::ssize(all.species)}, at::kDouble);
  for (const std::string& one : frame.species) {
    counts.mutable_data_ptr<double>()[type_of(all, one)] += 1;
  }
  return counts;
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
  for (const std::string& one : frame.species) types.push_back(type_of(all, one));
  structure.types = at::tensor(types, at::kLong);
  if (frame.energy) structure.energy = at::scalar_tensor(*frame.energy, at::kDouble);
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
