// A linear layer of every instruction set of this machine, judged by the plain loops.

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/dense_layer.h"

namespace tessera::kernels {
namespace {

std::vector<float> numbers(std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

TEST(DenseLayer, EveryLevelGivesThePlainLoopsAndASampleAloneTheSameBits) {
  for (const std::int64_t num_outputs : {1, 5, 16, 17, 32, 40, 70}) {
    for (const std::int64_t num_inputs : {1, 13, 64}) {
      for (const std::int64_t num_samples : {1, 3, 4, 9}) {
        for (const bool has_relu : {false, true}) {
          DenseLayer layer{nullptr, nullptr, num_inputs, num_outputs, has_relu};
          const std::int64_t padded = layer.num_blocks() * kDenseBlock;
          const auto weights = numbers(padded * num_inputs, 1);
          const auto bias = numbers(padded, 2);
          layer.weights = weights.data();
          layer.bias = bias.data();
          const std::int64_t in = num_inputs + 2;
          const std::int64_t out = num_outputs + 3;
          const auto input = numbers(num_samples * in, 3);
          std::vector<float> wanted(static_cast<std::size_t>(num_samples * out), 9.0F);
          dense_layer_reference().apply(layer, input.data(), in, num_samples, wanted.data(), out);
          for (const Isa isa : supported_isas()) {
            std::vector<float> found(wanted.size(), 9.0F);
            const auto& kernels = *dense_layer_kernels(isa);
            kernels.apply(layer, input.data(), in, num_samples, found.data(), out);
            for (std::size_t i = 0; i < wanted.size(); ++i) {
              ASSERT_NEAR(found[i], wanted[i], 1e-5 * static_cast<double>(num_inputs))
                  << name_of(isa) << ' ' << i;
            }
            std::vector<float> alone(wanted.size(), 9.0F);
            for (std::int64_t s = 0; s < num_samples; ++s) {
              kernels.apply(layer, input.data() + s * in, in, 1, alone.data() + s * out, out);
            }
            ASSERT_EQ(alone, found) << name_of(isa);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
