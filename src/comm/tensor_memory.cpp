#include "comm/tensor_memory.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include <optional>

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>

#include "tessera/core/check.h"

namespace tessera::comm {
namespace {

std::optional<DataType> data_type_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
      return DataType::kBool;
    case at::kByte:
      return DataType::kUInt8;
    case at::kChar:
      return DataType::kInt8;
    case at::kShort:
      return DataType::kInt16;
    case at::kInt:
      return DataType::kInt32;
    case at::kLong:
      return DataType::kInt64;
    case at::kHalf:
      return DataType::kFloat16;
    case at::kBFloat16:
      return DataType::kBFloat16;
    case at::kFloat:
      return DataType::kFloat32;
    case at::kDouble:
      return DataType::kFloat64;
    default:
      return std::nullopt;
  }
}

// Reals and bytes that a Transport knows, sharing the tensor's memory.
at::Tensor plain_view(const at::Tensor& contiguous) {
  // Almost always. Only the memory is used, so not even a detached tensor is made: that would be a
  // third of the time of a small operation.
  if (data_type_of(contiguous.scalar_type()) && !contiguous.is_neg()) return contiguous;
  at::Tensor view = contiguous.detach();
  if (view.is_conj() || view.is_neg()) view = view.resolve_conj().resolve_neg();
  if (view.is_complex()) return at::view_as_real(view);
  if (data_type_of(view.scalar_type())) return view;
  return view.view(at::kByte);
}

}  // namespace

bool share_memory(const std::vector<at::Tensor>& tensors) {
  if (tensors.size() < 2) return false;
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> ranges;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    std::int64_t last = 0;
    for (std::int64_t d = 0; d < tensor.dim(); ++d) {
      last += (tensor.size(d) - 1) * tensor.stride(d);
    }
    const auto first = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
    ranges.emplace_back(first, first + static_cast<std::size_t>(last + 1) * tensor.itemsize());
  }
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].second) return true;
  }
  return false;
}

bool share_memory(std::vector<at::Tensor> outputs, const at::Tensor& input, int own) {
  const auto place = static_cast<std::size_t>(own);
  const bool is_in_place = place < outputs.size() && outputs[place].is_contiguous() &&
                           input.is_contiguous() && outputs[place].numel() == input.numel() &&
                           outputs[place].const_data_ptr() == input.const_data_ptr();
  if (!is_in_place) outputs.push_back(input);
  return share_memory(outputs);
}

TensorMemory::TensorMemory(const at::Tensor& tensor, Use use, bool is_apart) {
  const bool is_ready = !is_apart && tensor.device().is_cpu() && tensor.is_contiguous() &&
                        !tensor.is_conj() && !tensor.is_neg();
  at::Tensor contiguous = tensor;
  if (!is_ready) {
    if (use != Use::kRead) {
      TESSERA_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                          "comm: elements of the output share memory, as those of an expanded "
                          "tensor do. Give a clone of it.");
      target_ = tensor.detach();
    }
    contiguous = use == Use::kWrite
                     ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU))
                     : tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
    if (is_apart && use != Use::kWrite && contiguous.is_alias_of(tensor)) {
      contiguous = contiguous.clone();
    }
  }
  // A scalar has no last dimension to reinterpret; as one row it does.
  memory_ = plain_view(contiguous.dim() == 0 ? contiguous.view({1}) : contiguous);
  storage_ = memory_.storage();
  data_ = memory_.data_ptr();
  dtype_ = *data_type_of(memory_.scalar_type());
  count_ = memory_.numel();
  row_count_ = memory_.size(0) > 0 ? count_ / memory_.size(0) : 0;
}

Piece TensorMemory::piece() const { return {data_, count_}; }

Piece TensorMemory::rows(std::int64_t first, std::int64_t num) const {
  auto* start = static_cast<char*>(data_);
  return {start + first * row_count_ * static_cast<std::int64_t>(size_of(dtype_)),
          num * row_count_};
}

std::vector<Piece> TensorMemory::even_parts(int num_parts) const {
  auto* start = static_cast<char*>(data_);
  const std::int64_t count = count_ / num_parts;
  std::vector<Piece> parts;
  for (int part = 0; part < num_parts; ++part) {
    parts.push_back({start + part * count * static_cast<std::int64_t>(size_of(dtype_)), count});
  }
  return parts;
}

void TensorMemory::write_back() const {
  if (!target_.defined()) return;
  at::Tensor result = memory_;
  if (target_.is_complex()) {
    result = at::view_as_complex(memory_);
  } else if (target_.scalar_type() != memory_.scalar_type()) {
    result = memory_.view(target_.scalar_type());
  }
  at::Tensor target = target_;
  target.copy_(result.view(target_.sizes()));
}

void check_tensor(std::string_view op, const at::Tensor& tensor, std::string_view engine) {
  TESSERA_CHECK_VALUE(tensor.defined(), "comm.", op, ": the tensor is undefined.");
  TESSERA_CHECK_VALUE(tensor.device().is_cpu() || tensor.device().is_cuda(), "comm.", op,
                      ": the tensor is on ", tensor.device().str(), ", but engine '",
                      std::string(engine),
                      "' works on CPU tensors and, through host memory, on CUDA tensors. Move it "
                      "to the CPU, or use a group with an engine for that device.");
  TESSERA_CHECK_VALUE(tensor.layout() == at::kStrided, "comm.", op, ": the tensor's layout is ",
                      tensor.layout(), ". Only all_reduce takes sparse tensors.");
}

void check_tensors(std::string_view op, const std::vector<at::Tensor>& tensors,
                   std::string_view engine) {
  for (const at::Tensor& tensor : tensors) {
    check_tensor(op, tensor, engine);
    TESSERA_CHECK_TYPE(tensor.scalar_type() == tensors.front().scalar_type(), "comm.", op,
                       ": the tensors have different types, ", tensors.front().scalar_type(),
                       " and ", tensor.scalar_type(), ".");
  }
}

ReduceOp check_reduction(std::string_view op, const c10d::ReduceOp& reduction,
                         at::ScalarType dtype) {
  const bool is_floating = at::isFloatingType(dtype);
  const bool is_complex = at::isComplexType(dtype);
  TESSERA_CHECK_TYPE(is_complex || data_type_of(dtype), "comm.", op, ": cannot reduce ", dtype,
                     " tensors. Convert them first, e.g. to float32 or int64.");
  const auto refuse = [&](const char* name) {
    TESSERA_CHECK_TYPE(false, "comm.", op, ": the ", name, " of ", dtype,
                       " tensors is not defined.");
  };
  switch (static_cast<c10d::ReduceOp::RedOpType>(reduction)) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      if (!is_floating && !is_complex) refuse("average");
      return ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT:
      if (is_complex) refuse("product");
      return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      if (is_complex) refuse("minimum");
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      if (is_complex) refuse("maximum");
      return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      if (is_floating || is_complex) refuse("bitwise and");
      return ReduceOp::kBand;
    case c10d::ReduceOp::BOR:
      if (is_floating || is_complex) refuse("bitwise or");
      return ReduceOp::kBor;
    case c10d::ReduceOp::BXOR:
      if (is_floating || is_complex) refuse("bitwise exclusive or");
      return ReduceOp::kBxor;
    case c10d::ReduceOp::PREMUL_SUM:
      if (!is_floating && !is_complex) refuse("scaled sum");
      return ReduceOp::kSum;
    default:
      TESSERA_CHECK_VALUE(false, "comm.", op, ": this reduction is not known.");
  }
  return ReduceOp::kSum;
}

}  // namespace tessera::comm
