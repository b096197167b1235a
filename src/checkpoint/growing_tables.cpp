#include "tessera/checkpoint/growing_tables.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "collision/growing_state.h"
#include "embedding/row_state.h"
#include "tessera/checkpoint/error.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"

namespace tessera::checkpoint {
namespace {

using collision::GrowingPart;
using collision::GrowingState;
using collision::GrowingTable;
using collision::IdList;
using collision::IdSketch;
using collision::IdTable;
using collision::kNumBuckets;

constexpr std::int64_t kSketchBytes = 4 * 4096;
/// Texts of all tables are hashed with one seed (decision 0016).
constexpr std::int64_t kTextSalt = 0;

at::Tensor tensor_of(const std::vector<std::int64_t>& numbers) {
  return at::tensor(numbers, at::kLong);
}

/// A part of the first dimension.
std::vector<std::int64_t> read_numbers(const Reader& source, const std::string& name,
                                       std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(end - begin));
  if (numbers.empty()) return numbers;
  source.read(name, {{begin}, {end - begin}}, reinterpret_cast<std::byte*>(numbers.data()));
  return numbers;
}

const TensorInfo& found(const Reader& source, const std::string& name) {
  const TensorInfo* info = source.find(name);
  if (info == nullptr) {
    throw Error(ErrorKind::kMissing, source.folder() + ": there is no tensor '" + name +
                                         "'. It is not a checkpoint of tables that grow.");
  }
  return *info;
}

/// A table of the checkpoint, cut to the buckets of a part.
struct Loaded {
  IdTable ids{};
  at::Tensor weight;
  std::map<std::string, at::Tensor> state;
};

class GrowingStateful final : public Stateful {
 public:
  GrowingStateful(std::shared_ptr<collision::GrowingTables> tables, std::string prefix,
                  std::string optimizer_prefix, std::shared_ptr<collision::GrowingChanges> changes,
                  bool is_published = false)
      : tables_(std::move(tables)),
        changes_(std::move(changes)),
        prefix_(std::move(prefix)),
        optimizer_prefix_(std::move(optimizer_prefix)),
        is_published_(is_published) {
    const bool is_pooled =
        dynamic_cast<collision::GrowingEmbeddingBagCollection*>(tables_.get()) != nullptr;
    group_ = is_pooled ? "embedding_bags." : "embeddings.";
  }

  void collect(std::vector<PlacedTensor>& tensors, Values& values) override;
  void collect_delta(std::vector<PlacedTensor>& tensors, std::vector<ListDelta>& lists,
                     Values& values) override;
  void prepare(const Reader& source, std::vector<PlacedTensor>& tensors) override;
  void finish(const Values& values) override;

 private:
  GrowingState& state() const { return *tables_->growing_state(); }
  std::string name_of(std::size_t table) const {
    return prefix_ + group_ + state().tables[table].config.name;
  }
  std::string state_name(std::size_t table) const {
    return optimizer_prefix_ + group_ + state().tables[table].config.name + ".weight.";
  }
  /// Where this rank's part of a list begins in that of all ranks, and how long that is.
  struct Extent {
    std::int64_t first = 0;
    std::int64_t all = 0;
  };
  /// For every part, the extents of lists with so many entries here. Collective.
  std::vector<std::vector<Extent>> extents_of(
      const std::vector<std::vector<std::int64_t>>& counts) const;
  void collect_rows(const GrowingPart& part, const IdList& list, const Extent& extent,
                    const std::string& suffix, std::vector<PlacedTensor>& tensors) const;
  void collect_buckets(const GrowingPart& part, const std::vector<std::int64_t>& sizes,
                       const std::string& name, std::vector<PlacedTensor>& tensors) const;
  void collect_sketch(const GrowingPart& part, const Extent& extent,
                      std::vector<PlacedTensor>& tensors) const;
  void collect_values(Values& values) const;
  void collect_unknown(std::vector<PlacedTensor>& tensors) const;
  void check_values(const Reader& source) const;
  Loaded prepare_part(const Reader& source, GrowingPart& part,
                      std::vector<PlacedTensor>& tensors) const;
  void load_sketch(const Reader& source, const GrowingPart& part, IdTable& ids) const;

  std::shared_ptr<collision::GrowingTables> tables_;
  std::shared_ptr<collision::GrowingChanges> changes_;  // since the last base; null: all is saved
  std::string prefix_;
  std::string optimizer_prefix_;
  bool is_published_;
  std::string group_;
  std::vector<Loaded> loaded_;                              // of every part, until a load is done
  std::vector<std::pair<at::Tensor, at::Tensor>> unknown_;  // where it goes, what was loaded
};

// ---- saving ----

// Ranks own runs of buckets in order of the ranks, so their lists lie behind each other.
std::vector<std::vector<GrowingStateful::Extent>> GrowingStateful::extents_of(
    const std::vector<std::vector<std::int64_t>>& counts) const {
  const GrowingState& own = state();
  const auto num_tables = static_cast<std::int64_t>(own.tables.size());
  constexpr std::int64_t kMostLists = 4;
  at::Tensor all = at::zeros({1, num_tables, kMostLists}, at::kLong);
  auto count = all.accessor<std::int64_t, 3>();
  for (std::size_t p = 0; p < own.parts.size(); ++p) {
    const auto table = static_cast<std::int64_t>(own.parts[p]->table);
    for (std::size_t i = 0; i < counts[p].size(); ++i) {
      count[0][table][static_cast<std::int64_t>(i)] = counts[p][i];
    }
  }
  if (own.group.size() > 1) all = comm::all_gather(all, own.group);
  const at::Tensor before = all.narrow(0, 0, own.group.rank()).sum(0);
  const at::Tensor sums = all.sum(0);
  std::vector<std::vector<Extent>> extents;
  for (std::size_t p = 0; p < own.parts.size(); ++p) {
    const auto table = static_cast<std::int64_t>(own.parts[p]->table);
    auto& lists = extents.emplace_back();
    for (std::int64_t i = 0; i < kMostLists; ++i) {
      lists.push_back({before[table][i].item<std::int64_t>(), sums[table][i].item<std::int64_t>()});
    }
  }
  return extents;
}

namespace {

/// Adds this rank's piece of a tensor with `rows` rows on all ranks.
void add_piece(const GrowingPart& part, const std::string& name, std::int64_t rows,
               std::int64_t first, const at::Tensor& tensor, std::vector<PlacedTensor>& tensors) {
  PlacedTensor placed;
  placed.name = name;
  placed.shape = tensor.sizes().vec();
  placed.shape[0] = rows;
  std::vector<std::int64_t> offsets(placed.shape.size(), 0);
  offsets[0] = first;
  // Of a list without entries, the first owner of the table writes the shape.
  const bool is_first = rows == 0 && part.ids.options().first_bucket == 0;
  if (tensor.size(0) > 0 || is_first) placed.pieces.push_back({offsets, tensor, {}});
  tensors.push_back(std::move(placed));
}

constexpr const char* kChanged = "@changed";

}  // namespace

void GrowingStateful::collect(std::vector<PlacedTensor>& tensors, Values& values) {
  const at::NoGradGuard no_grad;
  GrowingState& own = state();
  std::vector<std::vector<std::int64_t>> counts;
  for (const auto& part : own.parts) {
    const auto num_sketches = static_cast<std::int64_t>(part->ids.export_sketch().buckets.size());
    counts.push_back({part->ids.size(), num_sketches});
  }
  const auto extents = extents_of(counts);
  for (std::size_t p = 0; p < own.parts.size(); ++p) {
    const GrowingPart& part = *own.parts[p];
    const IdList list = tables_->export_ids(part.config->config.name);
    collect_rows(part, list, extents[p][0], "", tensors);
    collect_buckets(part, part.ids.bucket_sizes(), name_of(part.table) + ".bucket_rows", tensors);
    collect_sketch(part, extents[p][1], tensors);
  }
  collect_unknown(tensors);
  collect_values(values);
}

void GrowingStateful::collect_delta(std::vector<PlacedTensor>& tensors,
                                    std::vector<ListDelta>& lists, Values& values) {
  if (changes_ == nullptr) return collect(tensors, values);
  const at::NoGradGuard no_grad;
  GrowingState& own = state();
  std::vector<IdList> changed;
  std::vector<std::vector<std::int64_t>> counts;
  for (const auto& part : own.parts) {
    const std::string& table = part->config->config.name;
    changed.push_back(changes_->changed_ids(table));
    counts.push_back({static_cast<std::int64_t>(changed.back().ids.size()),
                      static_cast<std::int64_t>(changes_->removed_ids(table).size()),
                      static_cast<std::int64_t>(part->ids.export_sketch().buckets.size()),
                      part->ids.size()});
  }
  const auto extents = extents_of(counts);
  for (std::size_t p = 0; p < own.parts.size(); ++p) {
    const GrowingPart& part = *own.parts[p];
    const std::string name = name_of(part.table);
    collect_rows(part, changed[p], extents[p][0], kChanged, tensors);
    std::vector<std::int64_t> runs(kNumBuckets);
    for (const std::int64_t id : changed[p].ids) {
      ++runs[static_cast<std::size_t>(collision::bucket_of(id))];
    }
    collect_buckets(part, runs, name + ".bucket_rows" + kChanged, tensors);
    collect_buckets(part, part.ids.bucket_sizes(), name + ".bucket_rows", tensors);
    add_piece(part, name + ".removed", extents[p][1].all, extents[p][1].first,
              tensor_of(changes_->removed_ids(part.config->config.name)), tensors);
    collect_sketch(part, extents[p][2], tensors);
    ListDelta list{.name = name + ".ids",
                   .rows = extents[p][3].all,
                   .groups = name + ".bucket_rows",
                   .changed = name + ".ids" + kChanged,
                   .runs = name + ".bucket_rows" + kChanged,
                   .removed = name + ".removed"};
    std::vector<std::string> columns = {name + ".weight"};
    if (!is_published_) {
      columns.insert(columns.end(), {name + ".counts", name + ".last_step"});
      for (const auto& [slot, tensor] : part.state) {
        columns.push_back(state_name(part.table) + slot);
      }
    }
    for (const std::string& column : columns) list.columns.push_back({column, column + kChanged});
    lists.push_back(std::move(list));
  }
  collect_unknown(tensors);
  collect_values(values);
}

void GrowingStateful::collect_values(Values& values) const {
  GrowingState& own = state();
  values[prefix_ + group_ + "id_hash"] = std::string(collision::kIdHashName);
  if (is_published_) return;
  values[prefix_ + group_ + "calls"] = own.num_calls;
  for (std::size_t t = 0; t < own.tables.size(); ++t) {
    values[name_of(t) + ".seed"] = static_cast<std::int64_t>(own.tables[t].seed);
    if (own.tables[t].text_hash.empty()) continue;
    values[name_of(t) + ".str_hash"] = own.tables[t].text_hash;
    values[name_of(t) + ".str_salt"] = kTextSalt;
  }
  if (own.batch != nullptr) {
    values[optimizer_prefix_ + group_ + "step"] = own.batch->optimizer()->num_steps();
  }
  if (own.unknown_rows) {
    values[optimizer_prefix_ + group_ + "unknown.step"] = own.unknown_rows->optimizer().num_steps();
  }
}

void GrowingStateful::collect_rows(const GrowingPart& part, const IdList& list,
                                   const Extent& extent, const std::string& suffix,
                                   std::vector<PlacedTensor>& tensors) const {
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    add_piece(part, name + suffix, extent.all, extent.first, tensor, tensors);
  };
  const std::string name = name_of(part.table);
  const at::Tensor rows = tensor_of(list.rows);
  add(name + ".ids", tensor_of(list.ids));
  add(name + ".weight", part.weight->tensor().index_select(0, rows));
  if (is_published_) return;
  add(name + ".counts", tensor_of(list.counts));
  add(name + ".last_step", tensor_of(list.last_steps));
  for (const auto& [slot, tensor] : part.state) {
    add(state_name(part.table) + slot, tensor->tensor().index_select(0, rows));
  }
}

/// A number for each bucket of the part.
void GrowingStateful::collect_buckets(const GrowingPart& part,
                                      const std::vector<std::int64_t>& sizes,
                                      const std::string& name,
                                      std::vector<PlacedTensor>& tensors) const {
  const auto& options = part.ids.options();
  const at::Tensor own = tensor_of(sizes).slice(0, options.first_bucket, options.end_bucket);
  add_piece(part, name, kNumBuckets, options.first_bucket, own, tensors);
}

void GrowingStateful::collect_sketch(const GrowingPart& part, const Extent& extent,
                                     std::vector<PlacedTensor>& tensors) const {
  if (extent.all == 0 || is_published_) return;
  const std::string name = name_of(part.table);
  const IdSketch sketch = part.ids.export_sketch();
  const auto own = static_cast<std::int64_t>(sketch.buckets.size());
  at::Tensor counters = at::empty({own, kSketchBytes}, at::kByte);
  std::copy(sketch.counters.begin(), sketch.counters.end(), counters.data_ptr<std::uint8_t>());
  const auto add = [&](const char* what, const at::Tensor& tensor) {
    add_piece(part, name + what, extent.all, extent.first, tensor, tensors);
  };
  add(".sketch", counters);
  add(".sketch_buckets", tensor_of(sketch.buckets));
  add(".sketch_sightings", tensor_of(sketch.sightings));
}

void GrowingStateful::collect_unknown(std::vector<PlacedTensor>& tensors) const {
  GrowingState& own = state();
  if (!own.unknown_rows) return;
  const auto slots = own.unknown_rows->optimizer().state_dict();
  for (std::size_t t = 0; t < own.tables.size(); ++t) {
    if (own.tables[t].unknown != collision::UnknownIds::kRow) continue;
    const auto add = [&](const std::string& name, const at::Tensor& tensor) {
      tensors.push_back(
          {name,
           tensor.sizes().vec(),
           {{std::vector<std::int64_t>(static_cast<std::size_t>(tensor.dim()), 0), tensor, {}}},
           /*is_replicated=*/true});
    };
    add(name_of(t) + ".unknown", own.unknown_rows->row(t));
    if (is_published_) continue;
    for (const char* slot : {"momentum1", "momentum2"}) {
      const auto kept = slots.find(own.tables[t].config.name + "." + slot);
      if (kept != slots.end()) add(state_name(t) + "unknown." + slot, kept->second);
    }
  }
}

// ---- loading ----

void GrowingStateful::check_values(const Reader& source) const {
  const Values& values = source.manifest().values;
  const auto hash = values.find(prefix_ + group_ + "id_hash");
  if (hash == values.end()) {
    throw Error(ErrorKind::kMissing, source.folder() + ": does not say how ids are hashed ('" +
                                         prefix_ + group_ +
                                         "id_hash'). It is not a checkpoint of tables that grow.");
  }
  const auto* name = std::get_if<std::string>(&hash->second);
  if (name == nullptr || *name != collision::kIdHashName) {
    throw Error(ErrorKind::kInvalid,
                source.folder() + ": ids were hashed by '" + (name == nullptr ? "?" : *name) +
                    "'; this program hashes them by '" + std::string(collision::kIdHashName) +
                    "'. Load it with the program that saved it.");
  }
  for (std::size_t t = 0; t < state().tables.size(); ++t) {
    const std::string& text_hash = state().tables[t].text_hash;
    const auto saved_hash = values.find(name_of(t) + ".str_hash");
    if (saved_hash != values.end() && !text_hash.empty() &&
        saved_hash->second != Value(text_hash)) {
      const auto* text = std::get_if<std::string>(&saved_hash->second);
      throw Error(ErrorKind::kInvalid, source.folder() + ": texts of '" + name_of(t) +
                                           "' became ids by '" + (text == nullptr ? "?" : *text) +
                                           "'; here by '" + text_hash +
                                           "'. Load it with the program that saved it.");
    }
    const auto salt = values.find(name_of(t) + ".str_salt");
    if (salt != values.end() && salt->second != Value(kTextSalt)) {
      const auto* number = std::get_if<std::int64_t>(&salt->second);
      throw Error(ErrorKind::kInvalid,
                  source.folder() + ": texts of '" + name_of(t) + "' became ids with salt " +
                      (number == nullptr ? "?" : std::to_string(*number)) +
                      "; here without one. Load it with the program that saved it.");
    }
    const auto seed = values.find(name_of(t) + ".seed");
    const auto own = static_cast<std::int64_t>(state().tables[t].seed);
    if (seed == values.end() || std::get<std::int64_t>(seed->second) == own) continue;
    throw Error(ErrorKind::kInvalid,
                source.folder() + ": rows of '" + name_of(t) + "' begin from seed " +
                    std::to_string(std::get<std::int64_t>(seed->second)) + "; here it is " +
                    std::to_string(own) + ". Give the same seed.");
  }
}

void GrowingStateful::prepare(const Reader& source, std::vector<PlacedTensor>& tensors) {
  loaded_.clear();
  unknown_.clear();
  if (is_published_) {
    throw Error(ErrorKind::kInvalid, source.folder() +
                                         ": publications are for servers. Load a checkpoint that "
                                         "was saved with what training needs.");
  }
  check_values(source);
  GrowingState& own = state();
  for (const auto& part : own.parts) loaded_.push_back(prepare_part(source, *part, tensors));
  std::vector<PlacedTensor> unknown;
  collect_unknown(unknown);
  for (PlacedTensor& placed : unknown) {
    const at::Tensor target = placed.pieces[0].tensor;
    placed.pieces[0].tensor = at::empty_like(target);
    unknown_.emplace_back(target, placed.pieces[0].tensor);
    placed.is_replicated = false;  // each rank reads it by itself
    tensors.push_back(std::move(placed));
  }
}

Loaded GrowingStateful::prepare_part(const Reader& source, GrowingPart& part,
                                     std::vector<PlacedTensor>& tensors) const {
  const std::string name = name_of(part.table);
  const TensorInfo& weight = found(source, name + ".weight");
  const auto& options = part.ids.options();
  const auto fail = [&](const std::string& what) {
    throw Error(ErrorKind::kCorrupt, source.folder() + ": table '" + name + "' " + what);
  };
  for (const char* list : {".ids", ".counts", ".last_step"}) {
    const TensorInfo& info = found(source, name + list);
    if (info.shape == std::vector<std::int64_t>{weight.shape[0]} && info.dtype == Dtype::kI64) {
      continue;
    }
    fail("has " + std::to_string(weight.shape[0]) + " rows, but '" + list + "' is not as long.");
  }
  if (found(source, name + ".bucket_rows").shape != std::vector<std::int64_t>{kNumBuckets}) {
    fail("does not say how many rows each of its 1024 buckets has.");
  }
  const auto bucket_rows = read_numbers(source, name + ".bucket_rows", 0, kNumBuckets);
  const bool is_whole =
      std::all_of(bucket_rows.begin(), bucket_rows.end(), [](auto rows) { return rows >= 0; }) &&
      std::accumulate(bucket_rows.begin(), bucket_rows.end(), std::int64_t{0}) == weight.shape[0];
  if (!is_whole) {
    fail("has " + std::to_string(weight.shape[0]) +
         " rows, but its buckets overlap, or leave some out.");
  }
  const auto begin = std::accumulate(bucket_rows.begin(),
                                     bucket_rows.begin() + options.first_bucket, std::int64_t{0});
  const auto end = std::accumulate(bucket_rows.begin(), bucket_rows.begin() + options.end_bucket,
                                   std::int64_t{0});

  Loaded loaded{.ids = IdTable(options)};
  const auto ids = read_numbers(source, name + ".ids", begin, end);
  std::size_t next = 0;
  for (int bucket = options.first_bucket; bucket < options.end_bucket; ++bucket) {
    for (std::int64_t i = 0; i < bucket_rows[static_cast<std::size_t>(bucket)]; ++i, ++next) {
      const int own = collision::bucket_of(ids[next]);
      if (own == bucket) continue;
      fail("has id " + std::to_string(ids[next]) + " in row " +
           std::to_string(begin + static_cast<std::int64_t>(next)) + ", which is of bucket " +
           std::to_string(bucket) + "; the id is of bucket " + std::to_string(own) + ".");
    }
  }
  try {
    loaded.ids.load(ids, read_numbers(source, name + ".counts", begin, end),
                    read_numbers(source, name + ".last_step", begin, end));
    load_sketch(source, part, loaded.ids);
  } catch (const collision::IdListError& error) {
    fail("cannot be loaded, its rows counted from " + std::to_string(begin) + ": " + error.what());
  }
  const auto stage = [&](const std::string& tensor_name, const at::Tensor& like) {
    std::vector<std::int64_t> shape = like.sizes().vec();
    shape[0] = end - begin;
    at::Tensor memory = at::empty(shape, like.options().requires_grad(false));
    std::vector<std::int64_t> offsets(shape.size(), 0);
    offsets[0] = begin;
    shape[0] = weight.shape[0];
    tensors.push_back({tensor_name, shape, {{offsets, memory, {}}}});
    return memory;
  };
  loaded.weight = stage(name + ".weight", part.weight->tensor());
  for (const auto& [slot, tensor] : part.state) {
    loaded.state[slot] = stage(state_name(part.table) + slot, tensor->tensor());
  }
  // Taken for all tables before one of them changes.
  if (!part.reserve(end - begin)) {
    throw Error(ErrorKind::kRead, "checkpoint.load: no memory for " + std::to_string(end - begin) +
                                      " rows of table '" + part.config->config.name +
                                      "'; nothing has changed. Load on more ranks.");
  }
  return loaded;
}

void GrowingStateful::load_sketch(const Reader& source, const GrowingPart& part,
                                  IdTable& ids) const {
  const std::string name = name_of(part.table);
  const TensorInfo* info = source.find(name + ".sketch_buckets");
  if (info == nullptr) return;
  const auto buckets = read_numbers(source, name + ".sketch_buckets", 0, info->shape[0]);
  const auto place = [&](int bucket) {
    return std::lower_bound(buckets.begin(), buckets.end(), bucket) - buckets.begin();
  };
  const std::int64_t begin = place(ids.options().first_bucket);
  const std::int64_t end = place(ids.options().end_bucket);
  IdSketch sketch;
  sketch.buckets.assign(buckets.begin() + begin, buckets.begin() + end);
  sketch.sightings = read_numbers(source, name + ".sketch_sightings", begin, end);
  sketch.counters.resize(static_cast<std::size_t>((end - begin) * kSketchBytes));
  if (begin < end) {
    source.read(name + ".sketch", {{begin, 0}, {end - begin, kSketchBytes}},
                reinterpret_cast<std::byte*>(sketch.counters.data()));
  }
  ids.load_sketch(sketch);
}

void GrowingStateful::finish(const Values& values) {
  const at::NoGradGuard no_grad;
  GrowingState& own = state();
  own.read_unread();
  for (std::size_t p = 0; p < loaded_.size(); ++p) {
    GrowingPart& part = *own.parts[p];
    Loaded& loaded = loaded_[p];
    const bool has_memory = part.take(std::move(loaded.ids), loaded.weight, loaded.state);
    TESSERA_INTERNAL_ASSERT(has_memory, "checkpoint.load: the rows of table '",
                            part.config->config.name, "' were given memory, but have none");
  }
  for (const auto& [target, value] : unknown_) at::Tensor(target).copy_(value);
  loaded_.clear();
  unknown_.clear();
  const auto number = [&](const std::string& name, std::int64_t otherwise) {
    const auto value = values.find(name);
    return value == values.end() ? otherwise : std::get<std::int64_t>(value->second);
  };
  own.num_calls = number(prefix_ + group_ + "calls", 0);
  own.forget_changes();
  if (own.batch != nullptr) {
    own.batch->optimizer()->state().num_steps = number(optimizer_prefix_ + group_ + "step", 0);
  }
  if (own.unknown_rows) {
    own.unknown_rows->optimizer().state().num_steps =
        number(optimizer_prefix_ + group_ + "unknown.step", 0);
  }
}

}  // namespace

void add_growing_tables(State& state, std::shared_ptr<collision::GrowingTables> tables,
                        const std::string& prefix, const std::string& optimizer_prefix,
                        std::shared_ptr<collision::GrowingChanges> changes) {
  state.add(std::make_shared<GrowingStateful>(std::move(tables), prefix, optimizer_prefix,
                                              std::move(changes)));
}

std::shared_ptr<collision::GrowingChanges> add_published_rows(
    State& state, const std::shared_ptr<collision::GrowingTables>& tables,
    const std::string& prefix) {
  auto changes = tables->track_changes();
  state.add(std::make_shared<GrowingStateful>(tables, prefix, "", changes, /*is_published=*/true));
  return changes;
}

}  // namespace tessera::checkpoint
