#include "comm/nccl/nccl_backend.h"
#include "tessera/core/check.h"

namespace tessera::comm {

bool has_nccl() noexcept { return false; }

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>&, int,
                                                    int, std::chrono::milliseconds) {
  TESSERA_CHECK_VALUE(false,
                      "comm: this build has no NCCL. Build against a LibTorch with CUDA, on a "
                      "machine with NCCL's header, or use CPU tensors.");
}

}  // namespace tessera::comm
