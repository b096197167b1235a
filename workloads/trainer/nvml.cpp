#include "trainer/nvml.h"

#include <dlfcn.h>

namespace tessera::trainer {
namespace {

// The few declarations of NVML's C interface that are needed; their layout never changes.
using Device = void*;
struct Utilization {
  unsigned gpu;
  unsigned memory;
};
struct Memory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

/// The library, opened once per process and never closed.
class Library {
 public:
  static const Library& get() {
    static const Library library;
    return library;
  }

  bool is_there() const noexcept { return is_there_; }
  int (*handle_by_address)(const char*, Device*) = nullptr;
  int (*name_of)(Device, char*, unsigned) = nullptr;
  int (*memory_of)(Device, Memory*) = nullptr;
  int (*use_of)(Device, Utilization*) = nullptr;
  int (*driver_version)(int*) = nullptr;

 private:
  Library() {
    void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    const auto find = [&](const char* name, auto& function) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      return function != nullptr;
    };
    int (*init)() = nullptr;
    is_there_ = find("nvmlInit_v2", init) &&
                find("nvmlDeviceGetHandleByPciBusId_v2", handle_by_address) &&
                find("nvmlDeviceGetName", name_of) && find("nvmlDeviceGetMemoryInfo", memory_of) &&
                find("nvmlDeviceGetUtilizationRates", use_of) &&
                find("nvmlSystemGetCudaDriverVersion_v2", driver_version) && init() == 0;
  }

  bool is_there_ = false;
};

}  // namespace

std::optional<GpuFacts> gpu_at(const std::string& pci_address) {
  const Library& nvml = Library::get();
  Device device = nullptr;
  if (!nvml.is_there() || nvml.handle_by_address(pci_address.c_str(), &device) != 0) {
    return std::nullopt;
  }
  GpuFacts facts;
  char name[128] = "";
  if (nvml.name_of(device, name, sizeof(name)) == 0) facts.name = name;
  Memory memory{};
  if (nvml.memory_of(device, &memory) == 0) {
    facts.total_bytes = static_cast<std::int64_t>(memory.total);
    facts.used_bytes = static_cast<std::int64_t>(memory.used);
  }
  Utilization use{};
  if (nvml.use_of(device, &use) == 0) facts.percent = static_cast<int>(use.gpu);
  return facts;
}

int driver_cuda_version() {
  int version = 0;
  const Library& nvml = Library::get();
  return nvml.is_there() && nvml.driver_version(&version) == 0 ? version : 0;
}

}  // namespace tessera::trainer
