// src/kernels/token_rows.h — from the statistics of all ranks to one number per token, and back.
//
// What the ranks exchange: each rank contributes `num_parts` parts behind a header of kHeader
// 32-bit words (among them the vocabulary ids [start, end) of its columns). A part holds
// `num_fields` arrays of one value per row: maximum, sum, then those of target, total, weighted,
// best that are wanted, in this order. Most often num_parts is 1.
//
// merge_tokens, for every row, over the parts of all ranks in rank order (k is `scale`):
//
//   m = max maximum_p;  d_p = k (maximum_p - m);  s = sum_p sum_p exp(d_p)
//   w = sum_p exp(d_p) (weighted_p + d_p sum_p);  x_y = max target_p;  t = sum_p total_p
//   log_sum_exp = k m + log s                      log_probability = k (x_y - m) - log s
//   entropy = log s - w / s                        best = the best of the first part with maximum m
//   loss = (1 - a) (-log_probability) + a (log_sum_exp - k t / vocabulary) + z log_sum_exp^2
//
// with a the label smoothing and z the weight of the squared log-sum-exp. A row whose label is the
// ignored one has loss and log_probability 0. A label outside the vocabulary makes both NaN.
//
// fold_parts does the first two lines for the parts of one rank alone, and leaves one part of them.
// A rank that sees its columns a few at a time holds few parts so, however many there are.
//
// token_coefficients turns the gradients of these numbers into what softmax_gradient.h asks for.
// All compute in double: there are few rows. The same text serves CPU and CUDA.

#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif

namespace tessera::kernels {

inline constexpr std::int64_t kHeader = 8;

/// How the loss is made of a row's statistics.
struct LossShape {
  double scale = 1.0;
  double label_smoothing = 0.0;
  double z_loss = 0.0;
  std::int64_t ignored = -100;
};

struct MergeTask {
  const float* gathered = nullptr;
  std::int64_t num_ranks = 1;
  std::int64_t num_parts = 1;
  std::int64_t num_fields = 2;
  std::int64_t num_rows = 0;
  int target_field = -1;  // -1: not exchanged
  int total_field = -1;
  int weighted_field = -1;
  int best_field = -1;
  const std::int64_t* labels = nullptr;
  LossShape shape;
  std::int64_t vocab_size = 0;  // 0: the largest end of all headers

  // One value per row; `maximum` and `sum` always, the others if not null.
  float* maximum = nullptr;
  float* sum = nullptr;
  float* weighted = nullptr;
  float* loss = nullptr;
  float* log_probability = nullptr;
  float* log_sum_exp = nullptr;
  float* entropy = nullptr;
  std::int64_t* best = nullptr;

  // For the whole call.
  std::int64_t* vocab = nullptr;  // one value: the size of the vocabulary
  // If not null: the sum of the losses over `divisor`, which is the number of rows with a label (at
  // least 1) if `divide_by_count`, else 1. `inverse` gets one over the divisor.
  float* reduced = nullptr;
  float* inverse = nullptr;
  bool divide_by_count = false;
};

struct CoefficientsTask {
  std::int64_t num_rows = 0;
  const float* maximum = nullptr;
  const float* sum = nullptr;
  const float* weighted = nullptr;  // null: no entropy
  const std::int64_t* labels = nullptr;
  const std::int64_t* vocab = nullptr;
  LossShape shape;

  // Gradients of the outputs; null: none. Strides in elements, 0 for an expanded one.
  const float* loss = nullptr;
  std::int64_t loss_stride = 0;
  const float* inverse = nullptr;  // multiplies the gradient of the loss
  const float* log_probability = nullptr;
  const float* log_sum_exp = nullptr;
  const float* entropy = nullptr;

  float* out_softmax = nullptr;
  float* out_weighted = nullptr;  // null: none
  float* out_uniform = nullptr;
  float* out_target = nullptr;
};

/// One merged row.
struct TokenRow {
  double maximum = 0;
  double sum = 0;
  double weighted = 0;
  double target = 0;
  double total = 0;
  std::int64_t best = 0;
};

TESSERA_HOST_DEVICE inline std::int32_t word_of(const float* at) {
  union {
    float value;
    std::int32_t word;
  } both;
  both.value = *at;
  return both.word;
}

TESSERA_HOST_DEVICE inline float float_of(std::int32_t word) {
  union {
    std::int32_t word;
    float value;
  } both;
  both.word = word;
  return both.value;
}

TESSERA_HOST_DEVICE inline std::int64_t vocab_of(const MergeTask& task) {
  if (task.vocab_size > 0) return task.vocab_size;
  std::int64_t vocab = 0;
  const std::int64_t stride = kHeader + task.num_parts * task.num_fields * task.num_rows;
  for (std::int64_t rank = 0; rank < task.num_ranks; ++rank) {
    const std::int64_t end = word_of(task.gathered + rank * stride + 1);
    vocab = end > vocab ? end : vocab;
  }
  return vocab;
}

TESSERA_HOST_DEVICE inline TokenRow merged_row(const MergeTask& task, std::int64_t row) {
  const std::int64_t part_size = task.num_fields * task.num_rows;
  const std::int64_t rank_size = kHeader + task.num_parts * part_size;
  TokenRow merged;
  merged.maximum = -INFINITY;
  merged.target = -INFINITY;
  for (std::int64_t rank = 0; rank < task.num_ranks; ++rank) {
    for (std::int64_t part = 0; part < task.num_parts; ++part) {
      const float* fields = task.gathered + rank * rank_size + kHeader + part * part_size + row;
      const double maximum = fields[0];
      if (maximum > merged.maximum) {
        merged.maximum = maximum;
        if (task.best_field >= 0) merged.best = word_of(fields + task.best_field * task.num_rows);
      }
    }
  }
  const double center = merged.maximum == -INFINITY ? 0.0 : merged.maximum;
  for (std::int64_t rank = 0; rank < task.num_ranks; ++rank) {
    for (std::int64_t part = 0; part < task.num_parts; ++part) {
      const float* fields = task.gathered + rank * rank_size + kHeader + part * part_size + row;
      // All are read before the first is used: a GPU would wait for each in turn.
      const auto field = [&](int place) {
        return place >= 0 ? fields[place * task.num_rows] : 0.0F;
      };
      const float sum_here = field(1);
      const float weighted_here = field(task.weighted_field);
      const float target_here = field(task.target_field);
      const float total_here = field(task.total_field);
      const double distance = task.shape.scale * (static_cast<double>(fields[0]) - center);
      const double factor = exp(distance);
      const double sum = sum_here;
      merged.sum += sum * factor;
      if (task.weighted_field >= 0 && factor != 0.0) {
        merged.weighted += factor * (static_cast<double>(weighted_here) + distance * sum);
      }
      const double target = target_here;
      if (task.target_field >= 0 && (target > merged.target || target != target)) {
        merged.target = target;
      }
      merged.total += static_cast<double>(total_here);
    }
  }
  return merged;
}

/// Writes one row of the parts at `statistics`, which is behind the header of the task's only rank,
/// into the first of them.
TESSERA_HOST_DEVICE inline void fold_row(const MergeTask& task, float* statistics,
                                         std::int64_t row) {
  const TokenRow merged = merged_row(task, row);
  const auto field = [&](int place) -> float& { return statistics[place * task.num_rows + row]; };
  field(0) = static_cast<float>(merged.maximum);
  field(1) = static_cast<float>(merged.sum);
  if (task.target_field >= 0) field(task.target_field) = static_cast<float>(merged.target);
  if (task.total_field >= 0) field(task.total_field) = static_cast<float>(merged.total);
  if (task.weighted_field >= 0) field(task.weighted_field) = static_cast<float>(merged.weighted);
  if (task.best_field >= 0) {
    field(task.best_field) = float_of(static_cast<std::int32_t>(merged.best));
  }
}

TESSERA_HOST_DEVICE inline bool is_ignored(const LossShape& shape, const std::int64_t* labels,
                                           std::int64_t row) {
  return labels != nullptr && labels[row] == shape.ignored;
}

TESSERA_HOST_DEVICE inline bool is_outside(const std::int64_t* labels, std::int64_t row,
                                           std::int64_t vocab) {
  return labels != nullptr && (labels[row] < 0 || labels[row] >= vocab);
}

/// Writes what is wanted of one row and returns its loss.
TESSERA_HOST_DEVICE inline double merge_row(const MergeTask& task, std::int64_t row,
                                            std::int64_t vocab) {
  const TokenRow merged = merged_row(task, row);
  const LossShape& shape = task.shape;
  const double log_sum = log(merged.sum);
  const double log_sum_exp = shape.scale * merged.maximum + log_sum;
  task.maximum[row] = static_cast<float>(merged.maximum);
  task.sum[row] = static_cast<float>(merged.sum);
  if (task.weighted != nullptr) task.weighted[row] = static_cast<float>(merged.weighted);
  if (task.log_sum_exp != nullptr) task.log_sum_exp[row] = static_cast<float>(log_sum_exp);
  if (task.entropy != nullptr) {
    task.entropy[row] = static_cast<float>(log_sum - merged.weighted / merged.sum);
  }
  if (task.best != nullptr) task.best[row] = merged.best;
  double log_probability = shape.scale * (merged.target - merged.maximum) - log_sum;
  double loss = -log_probability;
  if (shape.label_smoothing != 0.0) {
    const double mean = merged.total / static_cast<double>(vocab);
    const double uniform = log_sum + shape.scale * (merged.maximum - mean);
    loss = (1.0 - shape.label_smoothing) * loss + shape.label_smoothing * uniform;
  }
  if (shape.z_loss != 0.0) loss += shape.z_loss * log_sum_exp * log_sum_exp;
  if (is_ignored(shape, task.labels, row)) {
    loss = 0.0;
    log_probability = 0.0;
  } else if (is_outside(task.labels, row, vocab)) {
    loss = NAN;
    log_probability = NAN;
  }
  if (task.loss != nullptr) task.loss[row] = static_cast<float>(loss);
  if (task.log_probability != nullptr) {
    task.log_probability[row] = static_cast<float>(log_probability);
  }
  return loss;
}

TESSERA_HOST_DEVICE inline void coefficients_row(const CoefficientsTask& task, std::int64_t row) {
  const LossShape& shape = task.shape;
  const double sum = task.sum[row];
  const bool ignored = is_ignored(shape, task.labels, row);
  double of_loss = 0.0;
  if (task.loss != nullptr && !ignored) {
    of_loss = task.loss[row * task.loss_stride];
    if (task.inverse != nullptr) of_loss *= static_cast<double>(*task.inverse);
    if (is_outside(task.labels, row, *task.vocab)) of_loss = NAN;
  }
  double of_label = task.log_probability != nullptr && !ignored
                        ? static_cast<double>(task.log_probability[row])
                        : 0.0;
  if (of_label != 0.0 && is_outside(task.labels, row, *task.vocab)) of_label = NAN;

  double softmax = of_loss - of_label;
  if (shape.z_loss != 0.0 && of_loss != 0.0) {
    const double log_sum_exp = shape.scale * static_cast<double>(task.maximum[row]) + log(sum);
    softmax += 2.0 * shape.z_loss * log_sum_exp * of_loss;
  }
  if (task.log_sum_exp != nullptr) softmax += static_cast<double>(task.log_sum_exp[row]);
  double weighted = 0.0;
  if (task.entropy != nullptr) {
    const double of_entropy = task.entropy[row];
    weighted = -of_entropy;
    softmax += of_entropy * static_cast<double>(task.weighted[row]) / sum;
  }
  const double uniform = shape.label_smoothing == 0.0
                             ? 0.0
                             : -of_loss * shape.label_smoothing / static_cast<double>(*task.vocab);
  const double target = of_label - of_loss * (1.0 - shape.label_smoothing);
  // A row without a gradient stays exactly 0, whatever its sum is.
  task.out_softmax[row] = softmax == 0.0 ? 0.0F : static_cast<float>(shape.scale * softmax / sum);
  if (task.out_weighted != nullptr) {
    task.out_weighted[row] =
        weighted == 0.0 ? 0.0F : static_cast<float>(shape.scale * weighted / sum);
  }
  task.out_uniform[row] = static_cast<float>(shape.scale * uniform);
  task.out_target[row] = static_cast<float>(shape.scale * target);
}

/// The loops for CPU tensors.
void merge_tokens(const MergeTask& task);
void fold_parts(const MergeTask& task, float* statistics, std::int64_t first, std::int64_t last);
void token_coefficients(const CoefficientsTask& task);

}  // namespace tessera::kernels
