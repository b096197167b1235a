// What users of a Replica call; the work is done by its State.

#include <utility>

#include "data_parallel/replica_state.h"
#include "tessera/core/check.h"
#include "tessera/data_parallel/replica.h"

namespace tessera::data_parallel {

namespace {

class ReplicaJoinHook final : public JoinHook {
 public:
  ReplicaJoinHook(std::shared_ptr<Replica::State> state, const JoinOptions& options)
      : state_(std::move(state)), options_(options) {}
  void main_hook() override { state_->shadow_iteration(options_); }
  void post_hook(bool is_last_joiner) override { state_->finish_join(is_last_joiner); }

 private:
  std::shared_ptr<Replica::State> state_;
  JoinOptions options_;
};

}  // namespace

Replica::Replica(ModelParts parts, const comm::Group& group, Options options)
    : state_(std::make_shared<State>(std::move(parts), group, std::move(options))) {
  state_->start();
}
Replica::~Replica() = default;

void Replica::before_forward() {
  const JoinOptions* join = join_options();
  if (join != nullptr) notify_join_context();
  state_->before_forward(join);
}
std::vector<at::Tensor> Replica::after_forward(std::vector<at::Tensor> outputs) {
  return state_->after_forward(std::move(outputs));
}
void Replica::prepare_for_backward(std::vector<at::Tensor> outputs) {
  state_->prepare_for_backward(std::move(outputs));
}
bool Replica::require_backward_grad_sync() const noexcept {
  return state_->require_backward_grad_sync;
}
void Replica::set_require_backward_grad_sync(bool value) noexcept {
  state_->require_backward_grad_sync = value;
}
bool Replica::require_forward_param_sync() const noexcept {
  return state_->require_forward_param_sync;
}
void Replica::set_require_forward_param_sync(bool value) noexcept {
  state_->require_forward_param_sync = value;
}
void Replica::register_comm_hook(std::shared_ptr<CommHook> hook) {
  state_->register_comm_hook(std::move(hook));
}
std::shared_ptr<CommHook> Replica::comm_hook() const { return state_->comm_hook(); }
void Replica::register_buffer_hook(BufferHook hook, BufferHookPlace place) {
  state_->register_buffer_hook(std::move(hook), place);
}
void Replica::sync_buffers() { state_->sync_buffers_now(); }
void Replica::set_sink_clone(bool value) noexcept { state_->has_sink_clone = value; }
void Replica::set_static_graph() { state_->set_static_graph(); }
void Replica::update_process_group(const comm::Group& group) {
  state_->update_process_group(group);
}
void Replica::reset() { state_->reset(); }
void Replica::set_sparse_metadata(std::map<std::string, at::Tensor> metadata) {
  TORCH_CHECK(state_->reducer, "set_sparse_metadata: all parameters are delayed.");
  state_->reducer->set_sparse_rows(std::move(metadata));
}
void Replica::check_finalized() { state_->check_finalized(); }
void Replica::remove_autograd_hooks() {
  state_->places.reset();
  if (state_->reducer) state_->reducer->remove_hooks();
}
void Replica::set_sample_rate(int sample_rate) {
  TESSERA_CHECK_VALUE(sample_rate >= 1,
                      "DDP runtime logging sample rate should be equal or greater than 1");
  if (state_->log) state_->log->set_sample_rate(sample_rate);
}
const comm::Group& Replica::group() const noexcept { return state_->group; }
const Options& Replica::options() const noexcept { return state_->options; }
const std::vector<NamedParameter>& Replica::parameters() const noexcept { return state_->reduced; }
double Replica::divisor() const noexcept { return state_->divisor(); }

LoggingData Replica::logging_data() {
  if (!state_->log) return {};
  LoggingData result = state_->log->data();
  if (state_->places) {
    result.integers["num_gradients_in_place"] = state_->places->num_in_place();
    result.integers["num_buckets_moved"] = state_->places->num_moved();
  }
  return result;
}
OverlapReport Replica::overlap_report() { return state_->overlap_report(); }

bool Replica::is_graph_static() const {
  return !state_->reducer || state_->reducer->is_graph_static();
}

at::Tensor Replica::used_map() const {
  return state_->reducer ? state_->reducer->used_by_ranks() : at::Tensor();
}

void Replica::log_error(const std::string& text) {
  if (state_->log) state_->log->set_error(text);
}

std::vector<std::vector<std::string>> Replica::buckets() const {
  std::vector<std::vector<std::string>> result;
  if (!state_->reducer) return result;
  for (const auto& bucket : state_->reducer->buckets().cut()) {
    std::vector<std::string> names;
    for (const std::size_t index : bucket) names.push_back(state_->reduced[index].name);
    result.push_back(std::move(names));
  }
  return result;
}

std::unique_ptr<JoinHook> Replica::join_hook(const JoinOptions& options) {
  return std::make_unique<ReplicaJoinHook>(state_, options);
}
comm::Group Replica::join_group() const { return state_->group; }
void Replica::before_forward_joined(const JoinOptions& options) {
  state_->before_forward(&options);
}
void Replica::shadow_iteration(const JoinOptions& options) { state_->shadow_iteration(options); }
int Replica::finish_join(bool is_last_joiner) { return state_->finish_join(is_last_joiner); }

NoSync::NoSync(Replica& replica) : replica_(replica), outer_(replica.require_backward_grad_sync()) {
  replica_.set_require_backward_grad_sync(false);
}
NoSync::~NoSync() { replica_.set_require_backward_grad_sync(outer_); }

}  // namespace tessera::data_parallel
