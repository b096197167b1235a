// tessera/pipeline/sparse_inputs.h — the ids of one batch, on their way to the ranks that own their
// rows.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/core/export.h"
#include "tessera/jagged/keyed_jagged_tensor.h"
#include "tessera/sharding/sharded_module.h"

namespace tessera::pipeline {

/// What one sharded module gets of a batch.
struct SparseInput {
  std::string name;
  std::shared_ptr<sharding::ShardedTables> tables;
  jagged::KeyedJaggedTensor features;
};

/// The input dists of all sharded modules for one batch, in three steps: start, wait_sizes,
/// wait_ids. All steps are collective: every rank takes them, in the same order.
class TESSERA_API SparseInputs {
 public:
  /// Starts: one message with the sizes of all modules of a group. Throws ValueError, before
  /// anything is sent, for feature weights that need a gradient.
  explicit SparseInputs(std::vector<SparseInput> inputs);

  /// The sizes are known and the ids are sent. Throws what the modules find wrong with the ids.
  void wait_sizes();
  /// The ids are here.
  void wait_ids();

  /// What compute_and_output_dist of a module takes. Throws ValueError if the module was not
  /// registered.
  const sharding::DistributedInput& of(const sharding::ShardedTables& tables) const;
  /// Throws ValueError naming a module whose input nobody has asked for.
  void check_all_used() const;

  /// Bytes of the features before they were sent.
  std::int64_t num_bytes() const noexcept { return num_bytes_; }

 private:
  struct Module {
    SparseInput input;
    std::optional<sharding::InputDist> sizes;
    std::optional<comm::Awaitable<sharding::DistributedInput>> ids;
    mutable bool is_used = false;
  };
  std::vector<Module> modules_;
  std::int64_t num_bytes_ = 0;
};

namespace detail {
/// A registered module, without the type of the batch.
struct Registration {
  std::string name;
  const sharding::ShardedTables* tables = nullptr;
  bool has_features = false;
};
/// Throws ValueError for what cannot be pipelined: no module, no extractor, a name or a module
/// twice.
TESSERA_API void check_registrations(const std::vector<Registration>& modules);
}  // namespace detail

}  // namespace tessera::pipeline
