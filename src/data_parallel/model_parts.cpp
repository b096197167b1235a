#include "tessera/data_parallel/model_parts.h"

#include <algorithm>
#include <set>
#include <unordered_set>
#include <utility>

#include <torch/nn/modules/embedding.h>

#include "tessera/core/check.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/outputs.h"

namespace tessera::data_parallel {
namespace {

constexpr std::string_view kPrefix = "module.";

std::string full_name(const std::string& module, const std::string& own) {
  return module.empty() ? own : std::string(module).append(".").append(own);
}

bool has_sparse_gradients(const torch::nn::Module& module) {
  if (const auto* table = dynamic_cast<const torch::nn::EmbeddingImpl*>(&module)) {
    return table->options.sparse();
  }
  if (const auto* bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&module)) {
    return bag->options.sparse();
  }
  return false;
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text.append(", ");
    text.append(names[i]);
  }
  return text;
}

}  // namespace

ModelParts parts_of(const std::shared_ptr<torch::nn::Module>& module) {
  TESSERA_CHECK_VALUE(module, "DistributedDataParallel: the module is null.");
  ModelParts parts;
  parts.name = module->name();
  std::unordered_set<c10::TensorImpl*> seen;
  for (const auto& entry : module->named_modules()) {
    for (const auto& parameter : entry.value()->named_parameters(/*recurse=*/false)) {
      if (!seen.insert(parameter.value().unsafeGetTensorImpl()).second) continue;
      parts.parameters.push_back({full_name(entry.key(), parameter.key()), parameter.value(),
                                  has_sparse_gradients(*entry.value())});
    }
  }
  parts.buffers = [weak = std::weak_ptr<torch::nn::Module>(module)] {
    std::vector<NamedTensor> buffers;
    const auto alive = weak.lock();
    if (!alive) return buffers;
    std::unordered_set<c10::TensorImpl*> seen;
    for (const auto& buffer : alive->named_buffers()) {
      if (buffer.value().defined() && seen.insert(buffer.value().unsafeGetTensorImpl()).second) {
        buffers.push_back({buffer.key(), buffer.value()});
      }
    }
    return buffers;
  };
  return parts;
}

std::map<std::string, at::Tensor> state_of(const torch::nn::Module& module,
                                           const std::string& prefix) {
  std::map<std::string, at::Tensor> state;
  for (const auto& parameter : module.named_parameters()) {
    state[prefix + parameter.key()] = parameter.value().detach();
  }
  for (const auto& buffer : module.named_buffers()) {
    if (buffer.value().defined()) state[prefix + buffer.key()] = buffer.value().detach();
  }
  return state;
}

void load_state(torch::nn::Module& module, const std::map<std::string, at::Tensor>& state) {
  const auto own = state_of(module);
  const bool has_prefix = !state.empty() && own.count(state.begin()->first) == 0 &&
                          std::all_of(state.begin(), state.end(), [](const auto& entry) {
                            return entry.first.starts_with(kPrefix);
                          });
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  std::set<std::string> missing;
  for (const auto& entry : own) missing.insert(entry.first);
  std::vector<std::string> unknown;
  for (const auto& [key, value] : state) {
    const std::string name = has_prefix ? key.substr(kPrefix.size()) : key;
    const auto place = own.find(name);
    if (place == own.end()) {
      unknown.push_back(key);
      continue;
    }
    missing.erase(name);
    TESSERA_CHECK_VALUE(value.sizes() == place->second.sizes(), "load_state_dict: '", key,
                        "' has the shape ", value.sizes(), ", the model's is ",
                        place->second.sizes(), ".");
    copies.emplace_back(place->second, value);
  }
  TESSERA_CHECK_VALUE(missing.empty() && unknown.empty(), "load_state_dict: missing: [",
                      listed({missing.begin(), missing.end()}), "], unknown: [", listed(unknown),
                      "].");
  at::NoGradGuard no_grad;
  for (auto& [target, source] : copies) target.copy_(source);
}

void visit_ivalue(c10::IValue& value, const std::function<void(at::Tensor&)>& visitor) {
  if (value.isTensor()) {
    at::Tensor tensor = value.toTensor();
    visitor(tensor);
    value = tensor;
  } else if (value.isTuple()) {
    std::vector<c10::IValue> elements = value.toTupleRef().elements().vec();
    for (c10::IValue& element : elements) visit_ivalue(element, visitor);
    value = c10::ivalue::Tuple::create(std::move(elements));
  } else if (value.isList()) {
    auto list = value.toList().copy();
    for (std::size_t i = 0; i < list.size(); ++i) {
      c10::IValue element = list.get(i);
      visit_ivalue(element, visitor);
      list.set(i, element);
    }
    value = list;
  } else if (value.isGenericDict()) {
    auto dictionary = value.toGenericDict().copy();
    for (const auto& entry : dictionary) {
      c10::IValue element = entry.value();
      visit_ivalue(element, visitor);
      entry.setValue(element);
    }
    value = dictionary;
  }
}

comm::Group replica_group(const comm::Mesh& mesh, const MeshAxes& axes) {
  std::vector<std::string> all = axes.average;
  all.insert(all.end(), axes.sum.begin(), axes.sum.end());
  TESSERA_CHECK_VALUE(!all.empty(), "DistributedDataParallel: name at least one axis of the mesh.");
  TESSERA_CHECK_VALUE(std::set<std::string>(all.begin(), all.end()).size() == all.size(),
                      "DistributedDataParallel: the axes [", listed(all),
                      "] name one twice. Gradients are either averaged or summed over it.");
  return mesh.flatten(all);
}

Options replica_options(const comm::Mesh& mesh, const MeshAxes& axes, Options options) {
  TESSERA_CHECK_VALUE(!options.divisor,
                      "DistributedDataParallel: on a mesh the axes say what to divide by; leave "
                      "`divisor` out.");
  double divisor = 1;
  for (const std::string& axis : axes.average) divisor *= mesh.size(axis);
  options.divisor = divisor;
  return options;
}

}  // namespace tessera::data_parallel
