// Stands in for table_cuda.cpp in a build without CUDA.

#include "embedding/table_pass.h"
#include "tessera/core/check.h"

namespace tessera::embedding::detail {
namespace {

[[noreturn]] void refuse() {
  TORCH_CHECK(false,
              "embedding: the tables are on a CUDA device, but this build has no CUDA kernels. "
              "Rebuild with TESSERA_BUILD_CUDA=ON, or move them to the CPU.");
}

}  // namespace

std::int64_t cuda_lookup(const TablePass&, Workspace&, bool, const at::Tensor&) { refuse(); }
std::int64_t cuda_check(const TablePass&, Workspace&, at::Device) { refuse(); }
void cuda_weight_gradient(const TablePass&, Workspace&, const at::Tensor&, const at::Tensor&) {
  refuse();
}
void cuda_backward(const TablePass&, const at::Tensor&, float, Workspace&,
                   std::vector<TableTarget>&) {
  refuse();
}
void cuda_step_rows(const kernels::TableRows&, const kernels::RowState&, const kernels::RowStep&,
                    const at::Tensor&, const at::Tensor&, float) {
  refuse();
}

}  // namespace tessera::embedding::detail
