// What is refused before anything is sent.

#include <set>
#include <string>

#include "data_parallel/names.h"
#include "data_parallel/replica_state.h"
#include "tessera/core/check.h"

namespace tessera::data_parallel {

void Replica::State::check_arguments() {
  const bool has_delayed = !options.delay_all_reduce_named_params.empty();
  TESSERA_CHECK_VALUE(has_delayed == options.param_to_hook_all_reduce.has_value(),
                      "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set "
                      "at the same time.");
  for (const NamedParameter& parameter : parts.parameters) {
    if (is_listed(options.ignored, parameter.name)) continue;
    kept.push_back(parameter);
    if (is_listed(options.delay_all_reduce_named_params, parameter.name)) continue;
    (parameter.tensor.requires_grad() ? reduced : frozen).push_back(parameter);
  }
  TORCH_CHECK(!reduced.empty() || has_delayed,
              "DistributedDataParallel is not needed when a module doesn't have any parameter that "
              "requires a gradient.");
  TESSERA_CHECK_VALUE(options.device_ids.size() <= 1,
                      "device_ids can only be None or contain a single element.");

  std::set<std::string> types;
  std::set<std::string> devices;
  for (const NamedParameter& parameter : kept) {
    types.insert(c10::DeviceTypeName(parameter.tensor.device().type(), /*lower_case=*/true));
    devices.insert(parameter.tensor.device().str());
  }
  const auto listed = [](const std::set<std::string>& names) {
    std::string text = "{";
    for (const std::string& name : names) text.append(text.size() > 1 ? ", " : "").append(name);
    return text.append("}");
  };
  TESSERA_CHECK_VALUE(types.size() == 1,
                      "DistributedDataParallel's input module must be on the same type of devices, "
                      "but input module parameters locate in ",
                      listed(types), ".");
  const bool is_gpu = *types.begin() != "cpu";
  if (!is_gpu || devices.size() > 1) {
    TESSERA_CHECK_VALUE(options.device_ids.empty() && !options.output_device,
                        "DistributedDataParallel device_ids and output_device arguments only work "
                        "with single-device/multiple-device GPU modules or CPU modules, but got "
                        "device_ids of ",
                        options.device_ids.size(), ", output_device ",
                        options.output_device ? options.output_device->str() : "none",
                        ", and module parameters ", listed(devices), ".");
  }
  TORCH_CHECK(!parts.has_uninitialized,
              "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
              "Run a dummy forward pass to correctly initialize the modules");
  TESSERA_CHECK_VALUE(!parts.has_sync_batch_norm || is_gpu,
                      "SyncBatchNorm layers only work with GPU modules");
  for (const NamedParameter& parameter : reduced) {
    TESSERA_CHECK_VALUE(parameter.tensor.is_leaf(), "DistributedDataParallel: '", parameter.name,
                        "' is the result of a computation; a parameter must be a leaf.");
  }
  if (options.bucket_cap_mb) {
    TESSERA_CHECK_VALUE(*options.bucket_cap_mb > 0, "DistributedDataParallel: bucket_cap_mb is ",
                        *options.bucket_cap_mb, ", it must be positive.");
  }
  for (const double size : options.bucket_cap_mb_list) {
    TESSERA_CHECK_VALUE(size > 0, "DistributedDataParallel: bucket_cap_mb_list contains ", size,
                        ", sizes must be positive.");
  }
  TESSERA_CHECK_VALUE(options.bucket_cap_mb_list.empty() || !options.bucket_cap_mb,
                      "DistributedDataParallel: give bucket_cap_mb or bucket_cap_mb_list, not "
                      "both.");
  TESSERA_CHECK_VALUE(!options.divisor || *options.divisor > 0,
                      "DistributedDataParallel: the divisor is ", *options.divisor,
                      ", it must be positive.");
}

}  // namespace tessera::data_parallel
