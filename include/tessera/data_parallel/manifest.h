// tessera/data_parallel/manifest.h — what a rank's model is, in words that can be compared.

#pragma once

#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/data_parallel/model_parts.h"
#include "tessera/data_parallel/options.h"

namespace tessera::data_parallel {

/// One line per parameter, buffer and option.
struct Manifest {
  std::vector<std::string> parameters;
  std::vector<std::string> buffers;
  std::vector<std::string> options;
};

/// Names, order, dtypes, shapes, strides, requires_grad, sparsity; options that must be the same
/// everywhere.
TESSERA_API Manifest manifest_of(const ModelParts& parts, const Options& options);

/// Compares the ranks' manifests: one small all-gather. Where they differ, the manifests themselves
/// are exchanged, and every rank throws comm::Error(kMismatch) with the same list of differences.
/// Collective; no tensor of the model is touched.
TESSERA_API void check_manifests(const Manifest& manifest, const comm::Group& group);

}  // namespace tessera::data_parallel
