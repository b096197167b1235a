#include "sharding/combine.h"

#include <ATen/Functions.h>

namespace tessera::sharding {
namespace {

at::Tensor block_of(const CombinePiece& piece, const std::vector<at::Tensor>& sources) {
  return sources[piece.source]
      .narrow(0, piece.begin, piece.batch * piece.columns)
      .view({piece.batch, piece.columns});
}

}  // namespace

at::Tensor combine(CombinePlan plan, const std::vector<at::Tensor>& sources) {
  std::vector<at::Tensor> columns;
  for (const CombinePiece& piece : plan.pieces) {
    at::Tensor block = block_of(piece, sources);
    if (piece.is_divided) block = block * plan.factors[piece.feature].unsqueeze(1);
    const at::Tensor& inverse = plan.inverse[piece.feature];
    if (inverse.defined()) block = block.index_select(0, inverse);
    if (piece.is_added) {
      columns.back() = columns.back() + block;
    } else {
      columns.push_back(block);
    }
  }
  return columns.size() == 1 ? columns[0].clone() : at::cat(columns, 1);
}

}  // namespace tessera::sharding
