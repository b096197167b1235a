// src/embedding/table_pass.h — one call of a batch of tables, on the CPU or on CUDA.

#pragma once

#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "embedding/row_state.h"
#include "kernels/table_rows.h"

namespace tessera::embedding::detail {

/// Throws unless `weight` is a table this module can train.
void check_weight(std::string_view operation, const std::string& name, const at::Tensor& weight);

/// One call, as the kernels see it. Holds pointers into the tensors of the call.
struct TablePass {
  kernels::LookupIds ids;
  std::vector<kernels::TableFeature> features;
  std::vector<std::int64_t> table_of;  // of each feature
  std::size_t num_tables = 0;
  bool is_sequence = false;
  bool is_weighted = false;
  std::uint64_t number = 0;  // of the call among all of its tables; 0: none
  std::int64_t num_bags = 0;
  std::int64_t num_positions = 0;
  std::int64_t num_outputs = 0;  // elements
};

/// Buffers that calls use one after another. They grow and do not shrink.
struct Workspace {
  std::mutex mutex;
  std::vector<kernels::RowEntry> entries;
  std::vector<kernels::RowEntry> spare;
  std::vector<std::uint32_t> counts;
  std::vector<std::uint32_t> bag_of;
  std::vector<float> rows;
  std::vector<float> gathered;       // gradients, feature by feature
  std::vector<std::int64_t> places;  // where a feature's begin
  std::vector<kernels::GradientSegment> segments;
  std::vector<kernels::RowGradients> gradients;
  std::vector<std::int64_t> firsts;  // of each table's entries
  struct Piece {
    std::size_t table;
    std::int64_t begin;
    std::int64_t end;
    std::int64_t row;  // number of the first row among the table's looked-up ones
  };
  std::vector<Piece> pieces;
  std::vector<std::size_t> order;
  std::uint64_t sorted_for = 0;  // the number of the call that the sorted entries are of
  std::vector<bool> is_sorted;   // by table
  /// CUDA: what is on the device, see table_cuda.cpp.
  at::Tensor device_bytes;
  at::Tensor device_features;
  std::vector<char> uploaded;

  std::int64_t bytes() const;
};

/// Where the rows of one table go in backward.
struct TableTarget {
  kernels::TableRows rows;
  enum class Kind : std::uint8_t { kNone, kDense, kSparse, kStep } kind = Kind::kNone;
  kernels::RowState state;  // kStep
  kernels::RowStep step;    // kStep
  at::Tensor indices;       // kSparse: rows, [looked-up rows], made by the pass
  at::Tensor values;        // kSparse: [looked-up rows, columns], made by the pass; kDense: given
};

/// Looks up into `output`. Returns the first position whose id is outside its table, or -1.
std::int64_t cpu_lookup(const TablePass& pass, float* output);
/// The gradient of the weights of the positions.
void cpu_weight_gradient(const TablePass& pass, const float* gradient, float* output);
/// Does a part of cpu_backward that needs no gradient; false if there is none left. Of the targets,
/// `rows` and `kind` are read. The workspace's mutex is held, here and below.
bool cpu_prepare_backward(const TablePass& pass, Workspace& workspace,
                          std::vector<TableTarget>& targets);
/// Sums the gradients of equal rows and hands them to the targets, one per table.
void cpu_backward(const TablePass& pass, const float* gradient, float limit, Workspace& workspace,
                  std::vector<TableTarget>& targets);
/// Steps rows by gradients [rows, columns]; `rows` is int64, ascending without repeats, or
/// undefined for all rows.
void step_rows(const kernels::TableRows& table, const kernels::RowState& state,
               const kernels::RowStep& step, const at::Tensor& rows, const at::Tensor& gradients,
               float limit);
void cpu_step_rows(const kernels::TableRows& table, const kernels::RowState& state,
                   const kernels::RowStep& step, const at::Tensor& rows,
                   const at::Tensor& gradients, float limit);

// The CUDA side; in a build without CUDA these throw. The work goes to the current stream.

/// As cpu_lookup; without `is_checked` it does not wait for the device and returns -1. Returns -2
/// if the offsets are not ascending from 0 to the number of ids.
std::int64_t cuda_lookup(const TablePass& pass, Workspace& workspace, bool is_checked,
                         const at::Tensor& output);
/// The check alone.
std::int64_t cuda_check(const TablePass& pass, Workspace& workspace, at::Device device);
void cuda_weight_gradient(const TablePass& pass, Workspace& workspace, const at::Tensor& gradient,
                          const at::Tensor& output);
void cuda_backward(const TablePass& pass, const at::Tensor& gradient, float limit,
                   Workspace& workspace, std::vector<TableTarget>& targets);
void cuda_step_rows(const kernels::TableRows& table, const kernels::RowState& state,
                    const kernels::RowStep& step, const at::Tensor& rows,
                    const at::Tensor& gradients, float limit);

}  // namespace tessera::embedding::detail
