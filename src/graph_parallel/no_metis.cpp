#include "graph_parallel/metis.h"
#include "tessera/core/check.h"

namespace tessera::graph_parallel::detail {

bool has_metis() noexcept { return false; }

at::Tensor metis_owners(std::int64_t, const at::Tensor&, int, const at::Tensor&) {
  TESSERA_CHECK_VALUE(false,
                      "graph.metis: this build has no METIS. Use recursive_bisection, or install "
                      "libmetis-dev and build again.");
}

}  // namespace tessera::graph_parallel::detail
