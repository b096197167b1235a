// tessera/data_parallel/powersgd.h — gradients as products of two thin matrices (PowerSGD, Vogels
// et al. 2019).
//
// The gradient of a weight, seen as an n x m matrix M, is sent as P (n x r) and Q (m x r) with
// M ~ P Q^T: (n + m) r numbers instead of n m. What is lost is added to the next step's gradient.
//
// Each bucket needs two dependent reductions, which run pipelined with the buckets around it; see
// docs/comm_hooks.md. All state is kept by parameter name, so that neither a new cut of the buckets
// nor a restart loses it.

#pragma once

#include <cstdint>
#include <memory>

#include "tessera/core/export.h"
#include "tessera/data_parallel/comm_hook.h"

namespace tessera::data_parallel {

struct PowerSgdOptions {
  /// r: how many columns P and Q have.
  std::int64_t matrix_approximation_rank = 1;
  /// Steps that average plainly before compression begins.
  std::int64_t start_step = 1000;
  /// Compress a matrix only if (n + m) r times this is less than n m.
  double min_compression_rate = 2;
  /// Add what compression lost to the next step's gradient.
  bool use_error_feedback = true;
  /// Begin with the last step's Q instead of a random one.
  bool warm_start = true;
  /// Added to the norms that columns are divided by. With 0, a column of zeros stays zero.
  double orthogonalization_epsilon = 0;
  /// The same on all ranks.
  std::uint64_t random_seed = 0;
  /// See each bucket as one square matrix instead of each parameter as its own. Faster and coarser.
  bool batched = false;
};

/// Elements of the gradients since the start of compression, and elements sent instead.
struct CompressionStats {
  std::int64_t before = 0;
  std::int64_t after = 0;
};

class TESSERA_API PowerSgd : public CommHook {
 public:
  virtual const PowerSgdOptions& options() const = 0;
  /// Steps done.
  virtual std::int64_t step() const = 0;
  virtual CompressionStats stats() const = 0;
};

/// Throws ValueError for a rank below 1, a negative start or rate.
TESSERA_API std::shared_ptr<PowerSgd> power_sgd_hook(const PowerSgdOptions& options = {});

}  // namespace tessera::data_parallel
