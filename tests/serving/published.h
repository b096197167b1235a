// A small model of which training goes on and publishes deltas.

#pragma once

#include <map>
#include <string>
#include <vector>

#include "samples.h"
#include "tessera/checkpoint/folder.h"

namespace tessera::serving {

// Rows of a table that a delta holds, and which columns; all if there is no end.
struct Change {
  int table;
  std::vector<std::int64_t> rows;
  std::int64_t column_begin = 0;
  std::int64_t column_end = SmallModel::kDim;
  std::vector<float> values = {};  // all columns, row by row; empty: the model's
};

// Saves `model` as a delta on step `base`: dense layers whole, of tables the rows of `changes`.
inline void save_delta(const SmallModel& model, const std::string& root, std::int64_t step,
                       std::int64_t base, const std::vector<Change>& changes) {
  checkpoint::PendingFolder folder(root, step);
  std::vector<checkpoint::Part> parts;
  std::vector<std::vector<float>> kept;
  kept.reserve(64);
  const auto add = [&](const std::string& name, checkpoint::Dtype dtype,
                       const std::vector<std::int64_t>& shape, const void* data) {
    checkpoint::Part part;
    part.name = name;
    part.dtype = dtype;
    part.shape = shape;
    part.region = {std::vector<std::int64_t>(shape.size(), 0), shape};
    part.data = static_cast<const std::byte*>(data);
    parts.push_back(std::move(part));
  };
  std::map<std::string, checkpoint::DeltaRecord> deltas;
  for (const auto& [name, tensor] : model.tensors) {
    if (name.starts_with("model.")) {
      add(name, checkpoint::Dtype::kF32, tensor.first, tensor.second.data());
    } else {
      deltas[name] = {name, checkpoint::Dtype::kF32, tensor.first, {}};
    }
  }
  for (const Change& change : changes) {
    const std::string name = "tables.embedding_bags.t_" + std::to_string(change.table) + ".weight";
    checkpoint::DeltaRecord& delta = deltas[name];
    const std::string suffix = ".0." + std::to_string(delta.pieces.size());
    const std::int64_t width = change.column_end - change.column_begin;
    std::vector<float>& values = kept.emplace_back();
    for (std::size_t i = 0; i < change.rows.size(); ++i) {
      const float* from = change.values.empty() ? model.tensors.at(name).second.data() +
                                                      change.rows[i] * SmallModel::kDim
                                                : change.values.data() + i * SmallModel::kDim;
      values.insert(values.end(), from + change.column_begin, from + change.column_end);
    }
    const auto count = static_cast<std::int64_t>(change.rows.size());
    add(name + "@rows" + suffix, checkpoint::Dtype::kI64, {count}, change.rows.data());
    add(name + "@values" + suffix, checkpoint::Dtype::kF32, {count, width}, values.data());
    delta.pieces.push_back({name + "@rows" + suffix, name + "@values" + suffix, change.column_begin,
                            change.column_end});
  }
  checkpoint::Manifest manifest = checkpoint::write_shard(folder.path(), 0, 1, parts);
  manifest.step = step;
  manifest.base = checkpoint::Base{checkpoint::folder_name(base),
                                   checkpoint::Reader(root, base).manifest().sha256};
  for (auto& [name, delta] : deltas) manifest.deltas.push_back(std::move(delta));
  folder.write_manifest(manifest);
  folder.commit();
}

// A model of which training goes on.
struct Published {
  Folder folder;
  std::string root = folder / "published";
  SmallModel small;
  ExportOptions options;
  std::int64_t step = 40;

  explicit Published(embedding::RowType type = embedding::RowType::kInt8) {
    options.type = type;
    small.save(root, step);
    write_package(checkpoint::Reader(root, step), folder / "pkg", options);
  }
  checkpoint::Reader newest() const { return checkpoint::Reader(root, step); }
  // Moves some rows and the dense layers, and publishes them.
  void train(const std::vector<Change>& changes) {
    for (auto& [name, tensor] : small.tensors) {
      if (!name.starts_with("model.")) continue;
      for (float& x : tensor.second) x += 0.01F;
    }
    for (const Change& change : changes) {
      for (const std::int64_t row : change.rows) {
        for (std::int64_t c = change.column_begin; c < change.column_end; ++c) {
          small.table(change.table)[static_cast<std::size_t>(row * SmallModel::kDim + c)] +=
              0.125F * static_cast<float>(step - 39);
        }
      }
    }
    save_delta(small, root, step + 1, step, changes);
    ++step;
  }
  // What an export of the newest step predicts.
  std::vector<float> exported(const Samples& samples) {
    const std::string path = folder / ("export-" + std::to_string(step));
    write_package(newest(), path, options);
    Model model(path);
    return predict(model, samples);
  }
  static std::vector<float> predict(Model& model, const Samples& samples) {
    auto lease = model.lease();
    return predict(lease, samples);
  }
  static std::vector<float> predict(Model::Lease& lease, const Samples& samples) {
    std::vector<float> logits(static_cast<std::size_t>(samples.num_samples));
    const auto bags = samples.bags();
    lease.predict({samples.num_samples, samples.dense, bags}, logits);
    return logits;
  }
};

}  // namespace tessera::serving
