// src/sharding/module_parts.h — what the sharded collections do alike.

#pragma once

#include <vector>

#include <torch/nn/module.h>

#include "sharding/input_dist.h"
#include "sharding/table_layout.h"
#include "tessera/embedding/table_batch.h"
#include "tessera/sharding/sharded_module.h"

namespace tessera::sharding {

/// `local_size` ranks per host; 0: as many as the environment says.
Topology topology_of(const comm::Group& group, int local_size);

/// `device` as tensors name it: with the number of the current one, if it has numbers.
at::Device numbered(at::Device device);

/// Registers `<holder>.<table>.weight`, and `weight_1` … for further shards of a table.
void register_shards(torch::nn::Module& owner, const char* holder,
                     const std::vector<LocalShard>& shards);

/// The features of some of the layout's local routes, as a lookup takes them.
embedding::LookupInput local_input(const TableLayout& layout, const DistContext& context,
                                   const std::vector<std::size_t>& routes, bool is_weighted);

}  // namespace tessera::sharding
