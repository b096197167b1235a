// The cases of linear_cases.h on a GPU, with one rank: autograd runs the backward of all threads of
// a process on one thread per device, so ranks that are threads cannot meet in a collective there.

#include "vocab_parallel/linear_cases.h"

namespace tessera::vocab_parallel {
namespace {

using tessera::testing::vocab_world_name;
using tessera::testing::VocabWorld;

INSTANTIATE_TEST_SUITE_P(Worlds, Linear,
                         ::testing::Values(VocabWorld{comm::Engine::kGloo, 1, at::kCUDA}),
                         vocab_world_name);

}  // namespace
}  // namespace tessera::vocab_parallel
