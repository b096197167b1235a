#include "trainer/host_copy.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/core/check.h"

namespace tessera::trainer {

void HostCopy::start(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach();
  if (!plain.is_cuda()) {
    host_ = plain.clone();
    return;
  }
  const bool fits = host_.defined() && host_.sizes() == plain.sizes() &&
                    host_.scalar_type() == plain.scalar_type();
  if (!fits) {
    host_ = at::empty(plain.sizes(), plain.options().device(at::kCPU).pinned_memory(true));
  }
  host_.copy_(plain, /*non_blocking=*/true);
  if (!done_) done_.emplace(at::kCUDA);
  done_->record(c10::impl::VirtualGuardImpl(at::kCUDA).getStream(plain.device()));
}

const at::Tensor& HostCopy::wait() {
  TESSERA_INTERNAL_ASSERT(host_.defined(), "a copy is started before it is waited for");
  if (done_) done_->synchronize();
  return host_;
}

}  // namespace tessera::trainer
