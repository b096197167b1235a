#include "comm/gloo/gloo_backend.h"

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

// Widen only after the tests pass against the new version: this file reads LibTorch's headers
// through declarations of our own.
static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11 && TORCH_VERSION_MINOR <= 13,
              "Tessera's Gloo declarations were checked against LibTorch 2.11 to 2.13");

namespace tessera::comm {

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout,
                                                    const std::string& address) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  // There is one operation at a time. And where a second thread is refused, LibTorch ends the
  // process, because the first one runs already.
  options->threads = 1;
  // By address, never by host name: a host name may resolve to an interface open to the network.
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, std::move(options));
}

std::optional<int> num_gloo_threads(const c10::intrusive_ptr<c10d::Backend>& engine) {
  auto* gloo = dynamic_cast<c10d::ProcessGroupGloo*>(engine.get());
  return gloo != nullptr ? std::optional(gloo->getNumThreads()) : std::nullopt;
}

}  // namespace tessera::comm
