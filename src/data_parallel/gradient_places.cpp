#include "data_parallel/gradient_places.h"

#include <algorithm>
#include <mutex>

#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

namespace tessera::data_parallel {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

constexpr int kUnknown = -1;
constexpr int kNever = -2;
constexpr int kMaxFailures = 3;
// LibTorch's allocator gives lines of the cache, and the bits of a product may depend on it.
constexpr std::uintptr_t kAlignment = 64;
// A gradient may pass through a node or two that only look at it differently (a transposed weight).
constexpr int kMaxHops = 3;

/// Replicas that watch a backward at present, in the whole process.
std::atomic<int> num_open{0};

bool is_at(const at::Tensor& tensor, const void* place) {
  return tensor.defined() && tensor.has_storage() && tensor.const_data_ptr() == place;
}

bool is_alive(const std::shared_ptr<Lease>& lease) {
  return lease && !lease->has_ended.load(std::memory_order_acquire);
}

}  // namespace

/// Runs when a parameter's gradient has been accumulated, before the reducer's hook; and marks the
/// nodes of the graph that lead to a place.
class GradientPlaces::ArrivalHook final : public torch::autograd::FunctionPostHook {
 public:
  ArrivalHook(GradientPlaces* owner, std::size_t place) : owner_(owner), place_(place) {}

  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    owner_->arrive(place(), inputs);
    return outputs;
  }
  // Compiled backwards know nothing of places; the reducer copies.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

  GradientPlaces& owner() const { return *owner_; }
  Place& place() const { return owner_->places_[place_]; }

 private:
  GradientPlaces* owner_;  // removes this before it ends
  std::size_t place_;
};

/// Stands before LibTorch's allocator of host memory. Asks only for large tensors, made by a node
/// of a backward, while some replica watches one.
class PlacingAllocator final : public c10::Allocator {
 public:
  /// While there are places, in the whole process.
  static void install() {
    const std::lock_guard lock(mutex());
    if (num_users++ > 0 || is_installed) return;
    // With the lowest priority: whoever has set another, or does so later, has the last word, and
    // gradients are copied.
    instance().inner_ = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&instance(), /*priority=*/0);
    is_installed = c10::GetCPUAllocator() == &instance();
  }
  static void remove() {
    const std::lock_guard lock(mutex());
    // Where another one came since, it may stand before this one.
    if (--num_users > 0 || c10::GetCPUAllocator() != &instance()) return;
    c10::SetCPUAllocator(instance().inner_, /*priority=*/0);
    is_installed = false;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < GradientPlaces::kLeastBytes || num_open.load(std::memory_order_relaxed) == 0 ||
        at::GradMode::is_enabled()) {
      return inner_->allocate(bytes);
    }
    const auto node = torch::autograd::get_current_node();
    return node ? allocate_for(*node, bytes) : inner_->allocate(bytes);
  }

  // What is given out by raw_allocate is never a place: nodes make tensors.
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  bool is_simple_data_ptr(const c10::DataPtr& pointer) const override {
    return inner_->is_simple_data_ptr(pointer);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }

 private:
  /// Never destroyed: tensors remember their allocator.
  static PlacingAllocator& instance() {
    static auto* allocator = new PlacingAllocator;
    return *allocator;
  }
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }

  c10::DataPtr allocate_for(const Node& node, std::size_t bytes) {
    std::shared_ptr<Lease> lease;
    std::vector<std::vector<const void*>*> learners;
    for (const auto& edge : node.next_edges()) {
      const GradientPlaces::ArrivalHook* hook = hook_behind(edge.function.get());
      if (hook == nullptr || !hook->owner().is_open_) continue;
      GradientPlaces::Place& place = hook->place();
      if (place.bytes != bytes || place.has_arrived) continue;
      if (place.ordinal == kUnknown) learners.push_back(&place.made);
      auto found = hook->owner().make(place);
      if (found) lease = std::move(found);
    }
    c10::DataPtr result;
    if (lease) {
      result = {lease->data, new std::shared_ptr<Lease>(lease), &end_lease, c10::kCPU};
    } else {
      result = inner_->allocate(bytes);
    }
    for (auto* made : learners) made->push_back(result.get());
    return result;
  }

  /// The hook of the parameter that the outcome of `node` is a gradient of, if it is one's alone.
  static const GradientPlaces::ArrivalHook* hook_behind(const Node* node) {
    for (int hop = 0; node != nullptr && hop < kMaxHops; ++hop) {
      for (const auto& hook : node->post_hooks()) {
        if (const auto* found = dynamic_cast<const GradientPlaces::ArrivalHook*>(hook.get())) {
          return found;
        }
      }
      if (node->num_outputs() != 1) return nullptr;
      node = node->next_edge(0).function.get();
    }
    return nullptr;
  }

  static void end_lease(void* context) {
    auto* lease = static_cast<std::shared_ptr<Lease>*>(context);
    // In this order: whoever counts the owners of the bucket then counts one too many, never one
    // too few.
    (*lease)->has_ended.store(true, std::memory_order_release);
    (*lease)->memory = c10::Storage();
    delete lease;
  }

  static inline int num_users = 0;
  static inline bool is_installed = false;
  c10::Allocator* inner_ = nullptr;
};

GradientPlaces::GradientPlaces(const std::vector<NamedParameter>& parameters) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& tensor = parameters[i].tensor;
    if (parameters[i].is_sparse || !tensor.is_cpu() || tensor.is_complex() ||
        !tensor.is_non_overlapping_and_dense() || tensor.nbytes() < kLeastBytes) {
      continue;
    }
    Place place;
    place.parameter = tensor;
    place.index = i;
    place.bytes = tensor.nbytes();
    places_.push_back(std::move(place));
  }
  if (places_.empty()) return;
  PlacingAllocator::install();
  for (std::size_t i = 0; i < places_.size(); ++i) {
    Place& place = places_[i];
    place.accumulator = torch::autograd::impl::grad_accumulator(place.parameter);
    place.hook = place.accumulator->add_post_hook(std::make_unique<ArrivalHook>(this, i));
  }
}

GradientPlaces::~GradientPlaces() {
  close();
  for (const Place& place : places_) place.accumulator->del_post_hook(place.hook);
  if (!places_.empty()) PlacingAllocator::remove();
}

void GradientPlaces::open() {
  for (Place& place : places_) {
    place.has_arrived = false;
    place.num_made = 0;
    place.made.clear();
  }
  if (is_open_ || places_.empty()) return;
  is_open_ = true;
  num_open.fetch_add(1, std::memory_order_relaxed);
}

void GradientPlaces::close() {
  if (!is_open_) return;
  is_open_ = false;
  num_open.fetch_sub(1, std::memory_order_relaxed);
}

std::shared_ptr<Lease> GradientPlaces::make(Place& place) {
  return place.num_made++ == place.ordinal ? lease(place) : nullptr;
}

// Note [Who else sees a place]
// The memory of a bucket is seen by the reducer's own tensors, by gradients of parameters, and by
// leases. If its storage has one owner more, somebody kept an old gradient and may need it in this
// very backward; then nothing is written before the reducer would write.
std::shared_ptr<Lease> GradientPlaces::lease(Place& place) {
  if (place.parameter.grad().defined() || is_alive(place.lease)) return nullptr;
  const at::Tensor& home = buckets_->view_of(place.index);
  if (!home.defined() || home.nbytes() != place.bytes ||
      home.strides() != place.parameter.strides()) {
    return nullptr;
  }
  void* data = home.data_ptr();
  if (reinterpret_cast<std::uintptr_t>(data) % kAlignment != 0) return nullptr;
  const c10::Storage& storage = home.storage();
  const auto num_leases = std::count_if(places_.begin(), places_.end(), [&](const Place& other) {
    return is_alive(other.lease) && buckets_->are_together(other.index, place.index);
  });
  if (storage.use_count() != buckets_->num_owners(place.index) + num_leases) return nullptr;
  place.lease = std::make_shared<Lease>(storage, data);
  return place.lease;
}

void GradientPlaces::arrive(Place& place, const variable_list& inputs) {
  if (!is_open_ && !place.lease) return;
  const at::Tensor& home = buckets_->view_of(place.index);
  const at::Tensor& gradient = place.parameter.grad();
  const bool is_first = !place.has_arrived;
  place.has_arrived = true;
  if (is_first && place.ordinal == kUnknown &&
      !(gradient.defined() && gradient.is_alias_of(home))) {
    learn(place);
  }
  if (!place.lease) return;

  const bool is_home = is_at(gradient, place.lease->data);
  if (gradient.defined() && gradient.is_alias_of(home)) {
    // The reducer's own view, which was added to; nobody but the reducer may see it then.
    if (is_alive(place.lease)) {
      move_bucket(place);
      fail(place);
    }
    return;
  }
  if (!is_alive(place.lease)) {
    place.lease.reset();
    if (is_first && !is_home) fail(place);  // what was made there was something else
    return;
  }
  if (is_home && gradient.sizes() == home.sizes() && gradient.strides() == home.strides() &&
      gradient.scalar_type() == home.scalar_type() && is_only_here(place, inputs)) {
    place.parameter.mutable_grad() = home;
    ++num_in_place_;
    return;
  }
  move_bucket(place);
  fail(place);
}

bool GradientPlaces::is_only_here(const Place& place, const variable_list& inputs) {
  const at::Tensor& gradient = place.parameter.grad();
  std::size_t num_known = 1;
  if (inputs.size() == 1 && inputs[0].defined() && inputs[0].is_alias_of(gradient)) {
    ++num_known;  // what the gradient was taken from; gone when the hooks have run
    if (inputs[0].is_view()) {
      if (inputs[0]._base().use_count() != 1) return false;
      ++num_known;  // and what that is a transpose of
    }
  }
  return gradient.use_count() == 1 && gradient.storage().use_count() == num_known;
}

void GradientPlaces::move_bucket(const Place& place) {
  buckets_->move_bucket_of(place.index);
  ++num_moved_;
  for (Place& other : places_) {
    if (buckets_->are_together(other.index, place.index)) other.lease.reset();
  }
}

void GradientPlaces::learn(Place& place) {
  // Memory is used again: the last tensor at an address is the one that is there.
  const at::Tensor& gradient = place.parameter.grad();
  for (int i = static_cast<int>(place.made.size()) - 1; i >= 0; --i) {
    if (!is_at(gradient, place.made[i])) continue;
    place.ordinal = i;
    place.made = {};
    return;
  }
  fail(place);
}

void GradientPlaces::fail(Place& place) {
  place.ordinal = ++place.num_failures < kMaxFailures ? kUnknown : kNever;
}

}  // namespace tessera::data_parallel
