// tessera/embedding/optimizer.h — optimizers that step single rows of tables.
//
// A step touches the rows that have a gradient and no others: their weights, their state. The
// gradients of a row that occurs several times are summed first, so each row takes one exact step.
// Bias corrections use the number of steps of the optimizer, not of the row.
//
// With g the summed gradient of a row, w its weights, D its number of columns and t the step:
//
//   kSgd                 w -= lr g
//   kAdagrad             h += g^2;            w -= lr g / (sqrt(h) + eps)
//   kRowWiseAdagrad      h += sum(g^2) / D;   w -= lr g / (sqrt(h) + eps)        one h per row
//   kAdam, kAdamW        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//                        w -= lr m' / (sqrt(v') + eps),  m' = m / (1 - b1^t),  v' = v / (1 - b2^t)
//   kPartialRowWiseAdam  the same with one v per row, of sum(g^2) / D
//   kLamb                u = m' / (sqrt(v') + eps) + wd w;  w -= lr (|w| / |u|) u
//   kPartialRowWiseLamb  the same with one v per row
//   kLarsSgd             r = lr eta |w| / (|g| + wd |w|);  m = mu m + r (g + wd w);  w -= m
//
// Weight decay: kL2 adds wd w to g before anything else, kDecoupled makes w -= lr wd w besides the
// step. kAdamW is always decoupled; for LAMB and LARS it stands where the formulas have it. Where a
// norm is 0, LAMB takes the ratio 1 and LARS the rate lr.

#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/core/export.h"

namespace tessera::embedding {

enum class OptimizerKind : std::uint8_t {
  kSgd,
  kAdagrad,
  kRowWiseAdagrad,
  kAdam,
  kAdamW,
  kPartialRowWiseAdam,
  kLamb,
  kPartialRowWiseLamb,
  kLarsSgd,
};

enum class WeightDecayMode : std::uint8_t { kL2, kDecoupled };

/// "SGD", "ADAGRAD", "ROWWISE_ADAGRAD", "ADAM", "ADAMW", "PARTIAL_ROWWISE_ADAM", "LAMB",
/// "PARTIAL_ROWWISE_LAMB" or "LARS_SGD".
TESSERA_API std::string_view name_of(OptimizerKind kind) noexcept;

struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::kSgd;
  double learning_rate = 0.01;
  double eps = 1e-8;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double weight_decay = 0.0;
  WeightDecayMode weight_decay_mode = WeightDecayMode::kL2;
  double momentum = 0.9;  // LARS
  double eta = 0.001;     // LARS
  /// What enters the accumulator of Adagrad at the start.
  double initial_accumulator = 0.0;
  /// Every element of the gradient that comes in is first moved into [-max, max].
  double max_gradient = std::numeric_limits<double>::infinity();
  /// float16 and bfloat16 rows are rounded up or down at random, so that small steps count in the
  /// mean. The same seed, step, table and row give the same bits, on every device.
  bool stochastic_rounding = false;
  std::uint64_t seed = 0;
};

/// Throws ValueError for numbers no optimizer can use. `operation` begins the text.
TESSERA_API void check_options(std::string_view operation, const OptimizerOptions& options);

/// The summed gradients of some rows of one table.
struct RowGradient {
  at::Tensor rows;    // int64, ascending, each once
  at::Tensor values;  // [rows, columns], float32
};

/// Whether a step of the rule reads a norm over a whole row.
TESSERA_API bool reads_row_norms(OptimizerKind kind) noexcept;

/// Sums numbers of rows over all parts of the rows: one tensor per table, one number per row of its
/// gradient, changed in place.
using RowSum = std::function<void(std::vector<at::Tensor>&)>;

/// The state of some tables and the rule that steps their rows. Not safe to share between threads.
class TESSERA_API RowOptimizer {
 public:
  /// `weights` are [rows, columns], contiguous, float32, float16 or bfloat16, on one device; they
  /// are shared, not copied. State is float32 and starts as zero (Adagrad: initial_accumulator).
  RowOptimizer(std::vector<std::pair<std::string, at::Tensor>> weights, OptimizerOptions options);

  /// Steps every table that has a gradient, from its `grad()`: sparse (rows it has not stay as they
  /// are; rows it has several times are summed first) or dense (every row steps). One step, however
  /// many backward passes the gradients come from.
  void step();
  /// Steps every table by the gradients given, one entry per table, in place of its `grad()`.
  void step_rows(const std::vector<RowGradient>& gradients);
  /// The same if the tables hold some columns of rows whose others lie elsewhere: norms over a row
  /// are made of what `sum` returns, and `num_columns[t]` is the number of columns of table t's
  /// whole rows. Each part then steps as the whole row would. Throws ValueError if rows are rounded
  /// at random, which depends on the columns.
  void step_cut_rows(const std::vector<RowGradient>& gradients,
                     const std::vector<std::int64_t>& num_columns, const RowSum& sum);
  /// Drops the gradients.
  void zero_grad();

  /// The 2-norm over all gradients of these tables, each row summed first. If it is greater than
  /// `max_norm`, the gradients are scaled so that it becomes `max_norm`. Sparse gradients become
  /// coalesced.
  double clip_grad_norm(double max_norm);
  /// Moves every element of the summed gradients into [-limit, limit].
  void clip_grad_value(double limit);

  const OptimizerOptions& options() const noexcept;
  /// From the next step on.
  void set_learning_rate(double learning_rate);
  std::int64_t num_steps() const noexcept;

  /// "<table>.momentum1" and "<table>.momentum2" as far as the rule has them, and "step". The
  /// tensors are the state itself, [rows, columns] or [rows].
  std::map<std::string, at::Tensor> state_dict() const;
  /// Copies. Throws ValueError naming what is missing, unexpected or of another shape, before it
  /// changes anything.
  void load_state_dict(const std::map<std::string, at::Tensor>& state);

  struct State;
  State& state() noexcept { return *state_; }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace tessera::embedding
