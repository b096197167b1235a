// The cases of linear_cases.h on a GPU. Two ranks are two processes that share it: see
// support/rank_processes.h.

#include "vocab_parallel/linear_cases.h"

namespace tessera::vocab_parallel {
namespace {

using tessera::testing::vocab_world_name;
using tessera::testing::VocabWorld;

INSTANTIATE_TEST_SUITE_P(Worlds, Linear,
                         ::testing::Values(VocabWorld{comm::Engine::kGloo, 1, at::kCUDA},
                                           VocabWorld{comm::Engine::kGloo, 2, at::kCUDA, true}),
                         vocab_world_name);

}  // namespace
}  // namespace tessera::vocab_parallel
