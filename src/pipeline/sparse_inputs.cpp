#include "tessera/pipeline/sparse_inputs.h"

#include <set>
#include <utility>

#include "tessera/core/check.h"
#include "tessera/core/step_recorder.h"

namespace tessera::pipeline {

using core::Phase;
using core::Span;

SparseInputs::SparseInputs(std::vector<SparseInput> inputs) {
  const Span span(Phase::kInputDist);
  for (SparseInput& input : inputs) {
    const at::Tensor& weights = input.features.weights_or_none();
    TESSERA_CHECK_VALUE(!weights.defined() || !weights.requires_grad(),
                        "pipeline: the weights of '", input.name,
                        "' need a gradient, so they come from parameters that earlier batches "
                        "still change. Run this module outside of the pipeline.");
    num_bytes_ += input.features.size_in_bytes();
    modules_.push_back({std::move(input), {}, {}, false});
  }
  // Modules of one group share the message of sizes, in the order of registration.
  for (std::size_t i = 0; i < modules_.size(); ++i) {
    if (modules_[i].sizes) continue;
    std::vector<std::size_t> members;
    std::vector<std::pair<sharding::ShardedTables*, jagged::KeyedJaggedTensor>> together;
    for (std::size_t j = i; j < modules_.size(); ++j) {
      const SparseInput& input = modules_[j].input;
      if (!(input.tables->group() == modules_[i].input.tables->group())) continue;
      members.push_back(j);
      together.emplace_back(input.tables.get(), input.features);
    }
    auto started = sharding::fused_input_dist(together);
    for (std::size_t k = 0; k < members.size(); ++k) {
      modules_[members[k]].sizes = std::move(started[k]);
    }
  }
}

void SparseInputs::wait_sizes() {
  const Span span(Phase::kInputDist);
  for (Module& module : modules_) {
    if (!module.ids) module.ids = module.sizes->wait();
  }
}

void SparseInputs::wait_ids() {
  wait_sizes();
  const Span span(Phase::kInputDist);
  for (const Module& module : modules_) module.ids->wait();
}

const sharding::DistributedInput& SparseInputs::of(const sharding::ShardedTables& tables) const {
  for (const Module& module : modules_) {
    if (module.input.tables.get() != &tables) continue;
    module.is_used = true;
    TESSERA_INTERNAL_ASSERT(module.ids, "an input is waited for before forward");
    return module.ids->wait();
  }
  TESSERA_CHECK_VALUE(false,
                      "pipeline: forward asked for the input of a module that was not registered. "
                      "Register it with an extractor, or call its forward.");
}

void SparseInputs::check_all_used() const {
  for (const Module& module : modules_) {
    TESSERA_CHECK_VALUE(module.is_used, "pipeline: forward did not use the input of '",
                        module.input.name,
                        "'. Take it from the inputs that forward is given, or do not register the "
                        "module.");
  }
}

namespace detail {

void check_registrations(const std::vector<Registration>& modules) {
  std::set<std::string> names;
  std::set<const sharding::ShardedTables*> seen;
  for (const Registration& module : modules) {
    TESSERA_CHECK_VALUE(!module.name.empty() && names.insert(module.name).second,
                        "pipeline: the name '", module.name,
                        "' is empty or registered twice. Give every module a name of its own.");
    TESSERA_CHECK_VALUE(module.tables != nullptr, "pipeline: '", module.name,
                        "' is no sharded module. Modules that are not sharded need not be "
                        "registered.");
    TESSERA_CHECK_VALUE(module.has_features, "pipeline: '", module.name,
                        "' has no extractor. Say which features of a batch it takes.");
    TESSERA_CHECK_VALUE(seen.insert(module.tables).second, "pipeline: '", module.name,
                        "' is registered under another name as well. A module that is used twice "
                        "in a forward cannot be pipelined.");
  }
}

}  // namespace detail

}  // namespace tessera::pipeline
