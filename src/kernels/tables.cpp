// The kernels that are tables of functions: the one of an instruction set, and that of the process.

#include "kernels/byte_rows.h"
#include "kernels/combine.h"
#include "kernels/dense_layer.h"
#include "kernels/id_lines.h"
#include "kernels/levels.h"
#include "kernels/neighbour_sum.h"
#include "kernels/pair_products.h"
#include "kernels/quantised_rows.h"
#include "kernels/row_init.h"
#include "kernels/table_lookup.h"
#include "kernels/table_update.h"

namespace tessera::kernels {

/// Defines both forms of `function` of a kernel's header.
#define TESSERA_KERNEL_CHOICE(Kernels, name, function)                       \
  TESSERA_KERNEL_LEVELS(Kernels, name);                                      \
  const Kernels* function(Isa isa) noexcept { return name##Levels.at(isa); } \
  const Kernels& function() noexcept {                                       \
    static const Kernels& kernels = *function(active_isa());                 \
    return kernels;                                                          \
  }

TESSERA_KERNEL_CHOICE(ByteRowKernels, kByteRows, byte_row_kernels)
TESSERA_KERNEL_CHOICE(CombineKernels, kCombine, combine_kernels)
TESSERA_KERNEL_CHOICE(DenseLayerKernels, kDenseLayer, dense_layer_kernels)
TESSERA_KERNEL_CHOICE(IdLineKernels, kIdLines, id_line_kernels)
TESSERA_KERNEL_CHOICE(PairProductKernels, kPairProducts, pair_product_kernels)
TESSERA_KERNEL_CHOICE(QuantisedRowKernels, kQuantisedRows, quantised_row_kernels)
TESSERA_KERNEL_CHOICE(RowInitKernels, kRowInit, row_init_kernels)
TESSERA_KERNEL_CHOICE(TableLookupKernels, kTableLookup, table_lookup_kernels)
TESSERA_KERNEL_CHOICE(TableUpdateKernels, kTableUpdate, table_update_kernels)

TESSERA_KERNEL_LEVELS(NeighbourSumKernels<float>, kNeighbourSumFloat);
TESSERA_KERNEL_LEVELS(NeighbourSumKernels<double>, kNeighbourSumDouble);

template <>
const NeighbourSumKernels<float>* neighbour_sum_kernels(Isa isa) noexcept {
  return kNeighbourSumFloatLevels.at(isa);
}

template <>
const NeighbourSumKernels<double>* neighbour_sum_kernels(Isa isa) noexcept {
  return kNeighbourSumDoubleLevels.at(isa);
}

template <typename T>
const NeighbourSumKernels<T>& neighbour_sum_kernels() noexcept {
  static const NeighbourSumKernels<T>& kernels = *neighbour_sum_kernels<T>(active_isa());
  return kernels;
}
template const NeighbourSumKernels<float>& neighbour_sum_kernels() noexcept;
template const NeighbourSumKernels<double>& neighbour_sum_kernels() noexcept;

}  // namespace tessera::kernels
