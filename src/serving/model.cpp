#include "tessera/serving/model.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>

#include "kernels/pair_products.h"
#include "serving/model_info.h"
#include "serving/store.h"
#include "serving/update.h"
#include "tessera/checkpoint/error.h"

namespace tessera::serving {
namespace {

// Samples that are computed at a time: their numbers between two layers stay in the cache.
constexpr std::int64_t kBlock = 64;

[[noreturn]] void refuse(const std::string& what, const std::string& where,
                         bool is_malformed = false) {
  throw BadRequest(what, where, is_malformed);
}

std::string place(const std::string& input, std::int64_t index) {
  return input + "[" + std::to_string(index) + "]";
}

void grow(std::vector<float>& numbers, std::int64_t count) {
  if (numbers.size() < static_cast<std::size_t>(count)) {
    numbers.resize(static_cast<std::size_t>(count));
  }
}

}  // namespace

BadRequest::~BadRequest() = default;

float sigmoid(float x) noexcept { return 1.0F / (1.0F + std::exp(-x)); }

// What one prediction needs besides the model; kept for the next.
struct Model::Workspace {
  std::shared_ptr<Store> store;
  ReaderLine* line = nullptr;
  int version = -1;                   // that the line holds
  std::vector<std::int64_t> offsets;  // one more than samples, per feature
  std::vector<std::int64_t> slots;    // of the ids of a block
  std::vector<std::int64_t> parts;    // where each feature's embedding begins
  std::vector<float> first;           // bottom's output
  std::vector<float> rows;            // embeddings
  std::vector<float> mixed;
  std::vector<float> crossed;
  std::vector<float> here;
  std::vector<float> there;
  PredictFigures figures;  // of the last request

  ~Workspace() { leave(); }

  // Reads versions of `next` from now on.
  void enter(const std::shared_ptr<Store>& next) {
    const bool is_own = line != nullptr && line->owner.load() == ::getpid();
    if (store == next && is_own) return;
    leave();
    line = &next->claim_line();
    store = next;
  }
  void leave() noexcept {
    if (line != nullptr) Store::return_line(*line);
    line = nullptr;
    store.reset();
  }

  void make_room(std::int64_t num_samples) {
    const ModelInfo& model = store->model();
    const auto count = static_cast<std::int64_t>(model.features.size());
    const auto num_offsets = static_cast<std::size_t>(count * (num_samples + 1));
    if (offsets.size() < num_offsets) offsets.resize(num_offsets);
    const std::int64_t dim = model.bottom.back();
    if (parts.size() != model.features.size()) {
      parts.resize(model.features.size());
      for (std::int64_t f = 0; f < count; ++f) parts[static_cast<std::size_t>(f)] = f * dim;
    }
    grow(first, kBlock * dim);
    grow(rows, kBlock * dim * count);
    for (auto* buffer : {&mixed, &crossed, &here, &there}) {
      grow(*buffer, kBlock * store->plan().widest);
    }
  }
};

struct Model::State {
  ModelOptions options;
  std::mutex writing;  // one update or reload at a time
  mutable std::mutex mutex;
  std::shared_ptr<Store> store;                // that later leases have
  std::vector<std::shared_ptr<Store>> stores;  // packages that were opened, oldest first
  std::vector<std::unique_ptr<Workspace>> workspaces;

  std::unique_ptr<Workspace> take_workspace() {
    const std::lock_guard lock(mutex);
    std::unique_ptr<Workspace> workspace;
    if (workspaces.empty()) {
      workspace = std::make_unique<Workspace>();
    } else {
      workspace = std::move(workspaces.back());
      workspaces.pop_back();
    }
    workspace->enter(store);
    return workspace;
  }
  void return_workspace(std::unique_ptr<Workspace> workspace) {
    Store::drop(*workspace->line);
    const std::lock_guard lock(mutex);
    if (workspace->store != store) workspace->leave();
    workspaces.push_back(std::move(workspace));
  }
  std::shared_ptr<Store> newest() const {
    const std::lock_guard lock(mutex);
    return store;
  }
  std::vector<std::shared_ptr<Store>> all() const {
    const std::lock_guard lock(mutex);
    return stores;
  }
};

namespace {

// Applies layers one after the other between two buffers; returns where the result is.
const float* run_layers(const std::vector<PlacedLayer>& layers, const float* block,
                        const float* input, std::int64_t stride, std::int64_t num_samples,
                        std::vector<float>& here, std::vector<float>& there) {
  for (const PlacedLayer& layer : layers) {
    layer.apply(block, input, stride, num_samples, here.data(), layer.num_outputs);
    input = here.data();
    stride = layer.num_outputs;
    std::swap(here, there);
  }
  return input;
}

}  // namespace

Model::Model(const std::string& path, bool verifies)
    : Model(path, ModelOptions{.verifies = verifies}) {}

Model::Model(const std::string& path, const ModelOptions& options)
    : state_(std::make_unique<State>()) {
  state_->options = options;
  state_->store =
      std::make_shared<Store>(path, options.verifies, options.keep_versions, options.unknown);
  state_->stores.push_back(state_->store);
}

Model::~Model() = default;

Model::Lease Model::lease() {
  auto workspace = state_->take_workspace();
  workspace->version = workspace->store->hold(*workspace->line);
  return Lease(state_.get(), std::move(workspace));
}

std::optional<Model::Lease> Model::lease(std::int64_t step) {
  auto workspace = state_->take_workspace();
  const auto stores = state_->all();
  for (auto store = stores.rbegin(); store != stores.rend(); ++store) {
    workspace->enter(*store);
    if (const auto version = (*store)->hold(*workspace->line, step)) {
      workspace->version = *version;
      return Lease(state_.get(), std::move(workspace));
    }
  }
  state_->return_workspace(std::move(workspace));
  return std::nullopt;
}

void Model::reload(const std::string& path, bool verifies) {
  const std::lock_guard writing(state_->writing);
  auto store = std::make_shared<Store>(path, verifies, state_->options.keep_versions,
                                       state_->options.unknown);
  std::vector<std::shared_ptr<Store>> gone;  // after the lock
  const std::lock_guard lock(state_->mutex);
  if (!has_same_inputs(store->model(), state_->store->model())) {
    throw checkpoint::Error(
        checkpoint::ErrorKind::kInvalid,
        path + ": its inputs and outputs are not those of the model that is served.");
  }
  auto& stores = state_->stores;
  state_->store = store;
  stores.push_back(std::move(store));
  const auto kept = static_cast<std::size_t>(state_->options.keep_versions) + 1;
  while (stores.size() > kept) {
    gone.push_back(std::move(stores.front()));
    stores.erase(stores.begin());
  }
}

UpdateReport Model::update(const checkpoint::Reader& reader, const Canary& canary) {
  const std::lock_guard writing(state_->writing);
  const auto store = state_->newest();
  if (!store->takes_updates()) {
    throw checkpoint::Error(checkpoint::ErrorKind::kInvalid,
                            "update: the model was opened without room for updates.");
  }
  Store::Draft draft(*store);
  UpdateReport report = write_update(reader, *store, draft);
  draft.publish(report.step, reader.manifest().commit, reader.manifest().sha256);
  if (canary) {
    Lease now = lease();
    auto workspace = state_->take_workspace();
    workspace->enter(store);  // somebody may have gone back to another package
    workspace->version = draft.number();
    workspace->line->version.store(draft.number());
    Lease next(state_.get(), std::move(workspace));
    canary(next, now);
  }
  draft.commit();
  return report;
}

std::vector<VersionInfo> Model::versions() const {
  std::vector<VersionInfo> versions;
  const auto current = state_->newest();
  for (const auto& store : state_->all()) {
    for (const int number : store->live()) {
      const VersionLine& line = store->version(number);
      versions.push_back({line.step, store == current && number == store->current(), line.made,
                          line.num_rows, line.commit, std::string(line.source.data())});
    }
  }
  return versions;
}

VersionInfo Model::current() const {
  const auto store = state_->newest();
  const VersionLine& line = store->version(store->current());
  return {line.step, true, line.made, line.num_rows, line.commit, std::string(line.source.data())};
}

bool Model::roll_back(std::int64_t step) {
  const std::lock_guard lock(state_->mutex);  // not `writing`: an update reads for long
  for (auto store = state_->stores.rbegin(); store != state_->stores.rend(); ++store) {
    if (!(*store)->make_current(step)) continue;
    state_->store = *store;
    return true;
  }
  return false;
}

std::int64_t Model::mapped_bytes() const {
  const auto store = state_->newest();
  return store->package().mapped_bytes() + store->updated_bytes();
}

bool Model::verify(const std::function<bool()>& goes_on) const {
  const auto store = state_->newest();
  return store->package().verify(goes_on);
}

embedding::RowTable Model::table_of_package(std::size_t table) const {
  return state_->newest()->package().table(table);
}

void Model::release_process(int process) noexcept {
  for (const auto& store : state_->all()) store->release_process(process);
}

void Model::give_up_writing() noexcept {
  for (const auto& store : state_->all()) store->give_up_writing();
}

void Model::take_over_writing() {
  const std::lock_guard writing(state_->writing);
  state_->newest()->take_over();
}

Model::Lease::Lease(State* state, std::unique_ptr<Workspace> workspace)
    : state_(state), workspace_(std::move(workspace)) {}
Model::Lease::Lease(Lease&&) noexcept = default;
Model::Lease::~Lease() {
  if (workspace_ != nullptr) state_->return_workspace(std::move(workspace_));
}

const ModelInfo& Model::Lease::model() const noexcept { return workspace_->store->model(); }

std::int64_t Model::Lease::step() const noexcept {
  return workspace_->store->version(workspace_->version).step;
}

const PredictFigures& Model::Lease::figures() const noexcept { return workspace_->figures; }

void Model::Lease::check(const Request& request) const {
  const ModelInfo& info = model();
  const auto num_samples = static_cast<std::size_t>(std::max<std::int64_t>(request.num_samples, 0));
  if (request.num_samples < 0 || request.features.size() != info.features.size()) {
    refuse("the request has " + std::to_string(request.features.size()) + " features, the model " +
               std::to_string(info.features.size()),
           "inputs");
  }
  if (request.dense.size() != num_samples * static_cast<std::size_t>(info.num_dense)) {
    refuse("dense has " + std::to_string(request.dense.size()) + " numbers; " +
               std::to_string(num_samples) + " samples of " + std::to_string(info.num_dense) +
               " are needed",
           "dense");
  }
  for (std::size_t i = 0; i < request.dense.size(); ++i) {
    if (!std::isfinite(request.dense[i])) {
      refuse("a number is not finite", place("dense", static_cast<std::int64_t>(i)));
    }
  }
  for (std::size_t f = 0; f < info.features.size(); ++f) {
    const FeatureBags& bags = request.features[f];
    const std::string& name = info.features[f].name;
    if (bags.lengths.size() != num_samples) {
      refuse("there are " + std::to_string(bags.lengths.size()) + " lengths for " +
                 std::to_string(num_samples) + " samples",
             name + ".lengths");
    }
    std::uint64_t sum = 0;
    for (std::size_t s = 0; s < num_samples; ++s) {
      if (bags.lengths[s] < 0) {
        refuse("a length is negative", place(name + ".lengths", static_cast<std::int64_t>(s)),
               true);
      }
      sum += static_cast<std::uint64_t>(bags.lengths[s]);
    }
    if (sum != bags.ids.size()) {
      refuse("the lengths sum to " + std::to_string(sum) + ", there are " +
                 std::to_string(bags.ids.size()) + " values",
             name + ".lengths", true);
    }
    const TableInfo& table = info.tables[info.features[f].table];
    const std::int64_t num_rows = table.num_rows;
    for (std::size_t k = 0; k < bags.ids.size() && !table.is_growing; ++k) {
      if (bags.ids[k] < 0 || bags.ids[k] >= num_rows) {
        refuse("id " + std::to_string(bags.ids[k]) + " is not one of the " +
                   std::to_string(num_rows) + " rows of table '" +
                   info.tables[info.features[f].table].name + "'",
               place(name + ".values", static_cast<std::int64_t>(k)));
      }
    }
    if (!bags.weights.empty() && bags.weights.size() != bags.ids.size()) {
      refuse("there are " + std::to_string(bags.weights.size()) + " weights for " +
                 std::to_string(bags.ids.size()) + " values",
             name + ".weights");
    }
    for (std::size_t k = 0; k < bags.weights.size(); ++k) {
      if (!std::isfinite(bags.weights[k])) {
        refuse("a weight is not finite", place(name + ".weights", static_cast<std::int64_t>(k)));
      }
    }
  }
}

void Model::Lease::predict(const Request& request, std::span<float> logits) {
  check(request);
  if (logits.size() != static_cast<std::size_t>(request.num_samples)) {
    refuse("there is room for " + std::to_string(logits.size()) + " results of " +
               std::to_string(request.num_samples) + " samples",
           "outputs");
  }
  const ModelInfo& info = model();
  Workspace& work = *workspace_;
  const Store& store = *work.store;
  const DensePlan& plan = store.plan();
  const float* block = store.dense(work.version);
  work.make_room(request.num_samples);
  work.figures = {};
  const auto num_features = static_cast<std::int64_t>(info.features.size());
  const std::int64_t dim = info.bottom.back();
  const std::int64_t mixed = info.top.front();
  const std::int64_t per_feature = request.num_samples + 1;
  for (std::int64_t f = 0; f < num_features; ++f) {
    std::int64_t* offsets = work.offsets.data() + f * per_feature;
    offsets[0] = 0;
    const auto& lengths = request.features[static_cast<std::size_t>(f)].lengths;
    for (std::int64_t s = 0; s < request.num_samples; ++s) {
      offsets[s + 1] = offsets[s] + lengths[static_cast<std::size_t>(s)];
    }
  }
  for (std::int64_t begin = 0; begin < request.num_samples; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, request.num_samples - begin);
    const std::int64_t stride = num_features * dim;
    const auto started = std::chrono::steady_clock::now();
    for (std::size_t f = 0; f < info.features.size(); ++f) {
      const FeatureBags& bags = request.features[f];
      const std::size_t table = info.features[f].table;
      const std::int64_t* offsets =
          work.offsets.data() + static_cast<std::int64_t>(f) * per_feature + begin;
      const std::int64_t* ids = bags.ids.data();
      if (store.has_slots(work.version, table)) {
        const auto first_id = static_cast<std::size_t>(offsets[0]);
        const auto end = static_cast<std::size_t>(offsets[count]);
        if (work.slots.size() < end) work.slots.resize(end);
        work.figures.num_unknown +=
            store.find_slots(work.version, table, bags.ids.subspan(first_id, end - first_id),
                             work.slots.data() + first_id);
        ids = work.slots.data();
      }
      embedding::pool_rows(store.rows(table),
                           {ids,
                            {offsets, static_cast<std::size_t>(count + 1)},
                            bags.weights.empty() ? nullptr : bags.weights.data(),
                            info.features[f].is_mean},
                           work.rows.data() + static_cast<std::int64_t>(f) * dim, stride);
    }
    const auto looked_up = std::chrono::steady_clock::now();
    const float* first =
        run_layers(plan.bottom, block, request.dense.data() + begin * info.num_dense,
                   info.num_dense, count, work.here, work.there);
    if (plan.down.empty()) {
      kernels::SampleVectors vectors;
      vectors.first = first;
      vectors.first_stride = dim;
      vectors.parts = work.rows.data();
      vectors.parts_stride = stride;
      vectors.offsets = work.parts.data();
      vectors.count = num_features;
      vectors.dim = dim;
      kernels::pair_product_kernels().products(vectors, 0, count, work.mixed.data());
    } else {
      for (std::int64_t s = 0; s < count; ++s) {
        float* to = work.mixed.data() + s * mixed;
        std::copy(first + s * dim, first + (s + 1) * dim, to);
        const float* rows = work.rows.data() + s * stride;
        std::copy(rows, rows + stride, to + dim);
      }
      // x' = x0 * (W (V x) + b) + x
      std::copy(work.mixed.begin(), work.mixed.begin() + count * mixed, work.crossed.begin());
      for (std::size_t i = 0; i < plan.down.size(); ++i) {
        const std::int64_t rank = plan.down[i].num_outputs;
        plan.down[i].apply(block, work.crossed.data(), mixed, count, work.here.data(), rank);
        plan.up[i].apply(block, work.here.data(), rank, count, work.there.data(), mixed);
        for (std::int64_t j = 0; j < count * mixed; ++j) {
          work.crossed[static_cast<std::size_t>(j)] +=
              work.mixed[static_cast<std::size_t>(j)] * work.there[static_cast<std::size_t>(j)];
        }
      }
      std::swap(work.mixed, work.crossed);
    }
    const float* result =
        run_layers(plan.top, block, work.mixed.data(), mixed, count, work.here, work.there);
    std::copy(result, result + count, logits.begin() + begin);
    work.figures.lookup += looked_up - started;
    work.figures.dense += std::chrono::steady_clock::now() - looked_up;
  }
}

}  // namespace tessera::serving
