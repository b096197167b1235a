// src/graph_parallel/metis.h — METIS, if it was there when the library was built.
//
// metis.cpp calls it, no_metis.cpp says that it is missing; CMake picks one.

#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace tessera::graph_parallel::detail {

bool has_metis() noexcept;

/// The owner of each node. Throws ValueError without METIS, or for an edge to a node there is not.
at::Tensor metis_owners(std::int64_t num_nodes, const at::Tensor& edge_index, int num_parts,
                        const at::Tensor& weights);

}  // namespace tessera::graph_parallel::detail
