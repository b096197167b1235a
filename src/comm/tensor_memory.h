// src/comm/tensor_memory.h — tensors as the contiguous memory a Transport works on.

#pragma once

#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "comm/transport.h"

namespace tessera::comm {

/// A tensor's elements in one piece of host memory for the time of an operation. CUDA tensors are
/// copied over and back; complex numbers become pairs of reals; types no reduction knows travel as
/// bytes.
class TensorMemory {
 public:
  enum class Use {
    kRead,       // copied if not contiguous
    kWrite,      // replaced by fresh memory if not contiguous, and written back
    kReadWrite,  // both
  };
  /// `is_apart`: never the tensor's own memory, for tensors that share it with others.
  TensorMemory(const at::Tensor& tensor, Use use, bool is_apart = false);

  Piece piece() const;
  /// Rows [first, first + num) of the first dimension.
  Piece rows(std::int64_t first, std::int64_t num) const;
  /// The elements cut into `num_parts` equal parts, whatever the shape.
  std::vector<Piece> even_parts(int num_parts) const;
  DataType dtype() const noexcept { return dtype_; }
  std::int64_t count() const noexcept { return count_; }
  /// Copies the result to where the caller expects it. After the operation.
  void write_back() const;

 private:
  at::Tensor target_;  // what to write back to; undefined if memory_ is it
  at::Tensor memory_;
  c10::Storage storage_;  // stays, even if the caller gives the tensor another one meanwhile
  void* data_;
  DataType dtype_;
  std::int64_t count_;      // elements of dtype_
  std::int64_t row_count_;  // elements of dtype_ in one row
};

/// Whether a place in memory belongs to two of the tensors. Elements between those of a tensor
/// count as its own.
bool share_memory(const std::vector<at::Tensor>& tensors);
/// As above, for outputs and an input that may be output `own` itself.
bool share_memory(std::vector<at::Tensor> outputs, const at::Tensor& input, int own);

/// The length of the first dimension; a scalar is one row.
inline std::int64_t num_rows_of(const at::Tensor& tensor) {
  return tensor.dim() == 0 ? 1 : tensor.size(0);
}

/// Throws ValueError or TypeError, naming the operator, unless `tensor` is dense and on the CPU or
/// a CUDA device.
void check_tensor(std::string_view op, const at::Tensor& tensor, std::string_view engine);
/// As above for each, and all of one type.
void check_tensors(std::string_view op, const std::vector<at::Tensor>& tensors,
                   std::string_view engine);
/// Throws TypeError when `reduction` makes no sense for the tensor's type.
ReduceOp check_reduction(std::string_view op, const c10d::ReduceOp& reduction,
                         at::ScalarType dtype);

}  // namespace tessera::comm
