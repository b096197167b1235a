#include "vocab_parallel/linear_cases.h"

namespace tessera::vocab_parallel {
namespace {

using tessera::testing::cuda_worlds;
using tessera::testing::vocab_world_name;

INSTANTIATE_TEST_SUITE_P(Worlds, Linear, ::testing::ValuesIn(cuda_worlds()), vocab_world_name);

}  // namespace
}  // namespace tessera::vocab_parallel
