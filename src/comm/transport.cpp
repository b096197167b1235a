#include "comm/transport.h"

namespace tessera::comm {

std::size_t size_of(DataType dtype) noexcept {
  switch (dtype) {
    case DataType::kBool:
    case DataType::kUInt8:
    case DataType::kInt8:
      return 1;
    case DataType::kInt16:
    case DataType::kFloat16:
    case DataType::kBFloat16:
      return 2;
    case DataType::kInt32:
    case DataType::kFloat32:
      return 4;
    case DataType::kInt64:
    case DataType::kFloat64:
      return 8;
  }
  return 1;
}

std::string_view name_of(DataType dtype) noexcept {
  switch (dtype) {
    case DataType::kBool:
      return "bool";
    case DataType::kUInt8:
      return "uint8";
    case DataType::kInt8:
      return "int8";
    case DataType::kInt16:
      return "int16";
    case DataType::kInt32:
      return "int32";
    case DataType::kInt64:
      return "int64";
    case DataType::kFloat16:
      return "float16";
    case DataType::kBFloat16:
      return "bfloat16";
    case DataType::kFloat32:
      return "float32";
    case DataType::kFloat64:
      return "float64";
  }
  return "unknown";
}

std::string_view name_of(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProduct:
      return "product";
    case ReduceOp::kBand:
      return "band";
    case ReduceOp::kBor:
      return "bor";
    case ReduceOp::kBxor:
      return "bxor";
  }
  return "unknown";
}

std::string_view name_of(Operator op) noexcept {
  switch (op) {
    case Operator::kAllReduce:
      return "all_reduce";
    case Operator::kReduce:
      return "reduce";
    case Operator::kBroadcast:
      return "broadcast";
    case Operator::kAllGather:
      return "all_gather";
    case Operator::kGather:
      return "gather";
    case Operator::kScatter:
      return "scatter";
    case Operator::kReduceScatter:
      return "reduce_scatter";
    case Operator::kAllToAll:
      return "all_to_all";
    case Operator::kBarrier:
      return "barrier";
    case Operator::kSend:
      return "send";
    case Operator::kRecv:
      return "recv";
  }
  return "unknown";
}

}  // namespace tessera::comm
