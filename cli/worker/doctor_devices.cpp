#include "doctor_devices.h"

#include <string>

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include "trainer/device.h"
#include "trainer/nvml.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

// 13000 is 13.0.
Json version_text(long version) {
  if (version <= 0) return nullptr;
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Json examine(at::Device device) {
  const trainer::DeviceFacts facts = trainer::device_facts(device);
  Json found{{"name", facts.name.empty() ? device.str() : facts.name},
             {"total_bytes", facts.total_bytes},
             {"free_bytes", facts.total_bytes - facts.used_bytes},
             {"error", nullptr}};
  try {
    const double sum = at::ones({1000}, at::TensorOptions(device)).sum().item<double>();
    if (sum != 1000) found["error"] = "a thousand ones add up to " + std::to_string(sum);
  } catch (const c10::Error& error) {
    found["error"] = error.what_without_backtrace();
  }
  return found;
}

}  // namespace

Json examine_devices() {
  Json answer{{"build", nullptr}, {"driver", nullptr}, {"devices", Json::array()}};
  if (!at::Context::hasCUDART() && !at::hasCUDA()) return answer;
  answer["build"] = version_text(at::detail::getCUDAHooks().versionCUDART());
  answer["driver"] = version_text(trainer::driver_cuda_version());
  const auto count = static_cast<int>(at::getNumGPUs());
  for (int i = 0; i < count; ++i) {
    answer["devices"].push_back(examine({at::kCUDA, static_cast<c10::DeviceIndex>(i)}));
  }
  return answer;
}

}  // namespace tessera::cli
