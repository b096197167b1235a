#include "tessera/comm/codec.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "support/error_text.h"
#include "support/ranks.h"

namespace tessera::comm {
namespace {

using tessera::testing::error_text;

at::Tensor random_values(std::int64_t count) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(count + 1);
  return at::randn({count}, generator, at::kFloat);
}

double largest_error(const CodecOptions& options, const at::Tensor& values,
                     const std::vector<std::int64_t>& parts) {
  const Codec codec(options);
  const at::Tensor wire = codec.encode(values, parts);
  std::int64_t expected = 0;
  for (const auto part : parts) expected += codec.wire_size(part);
  EXPECT_EQ(wire.numel(), expected);
  EXPECT_EQ(wire.scalar_type(), codec.wire_type(values.scalar_type()));
  const at::Tensor back = codec.decode(wire, parts, values.scalar_type());
  EXPECT_EQ(back.sizes(), values.sizes());
  EXPECT_EQ(back.scalar_type(), values.scalar_type());
  return values.numel() == 0 ? 0 : (back - values).abs().max().item<double>();
}

TEST(Codec, LosesNoMoreThanItsFormat) {
  const at::Tensor values = random_values(96);
  const double largest = values.abs().max().item<double>();
  const double width = (values.max() - values.min()).item<double>();
  EXPECT_EQ(largest_error({}, values, {96}), 0);
  EXPECT_LE(largest_error({.format = WireFormat::kFp16}, values, {96}), largest * 0x1p-11);
  EXPECT_LE(largest_error({.format = WireFormat::kBf16}, values, {96}), largest * 0x1p-8);
  // Half a step of 255 over a row's width; half a unit of the last of three bits.
  EXPECT_LE(largest_error({.format = WireFormat::kInt8}, values, {96}), width / 255 / 2 * 1.001);
  EXPECT_LE(largest_error({.format = WireFormat::kFp8}, values, {96}), largest * 0x1p-4 * 1.001);
}

TEST(Codec, PartsNeedNotBeWholeRows) {
  for (const auto format : {WireFormat::kInt8, WireFormat::kFp8}) {
    const CodecOptions options{.format = format, .row_size = 8};
    EXPECT_LE(largest_error(options, random_values(20), {0, 13, 1, 0, 6}), 0.3);
    EXPECT_EQ(largest_error(options, random_values(0), {0, 0}), 0);
    // Rows of equal values, and of zeros, come back as they are.
    EXPECT_EQ(largest_error(options, at::full({9}, 3.5), {9}), 0);
    EXPECT_EQ(largest_error(options, at::zeros({9}), {4, 5}), 0);
  }
}

TEST(Codec, RowsAreEncodedApart) {
  // A large value in one row does not coarsen another.
  at::Tensor values = at::linspace(0, 1, 64);
  values[0] = 1e6;
  const Codec codec(CodecOptions{.format = WireFormat::kInt8});
  const at::Tensor back = codec.decode(codec.encode(values, {64}), {64}, at::kFloat);
  EXPECT_LE((back - values).narrow(0, 32, 32).abs().max().item<double>(), 0.51 / 255 / 2 * 1.01);
}

TEST(Codec, SixteenBitsStayFiniteAndScale) {
  const at::Tensor large = at::tensor(std::vector<float>{1e6F, -1e6F});
  const Codec half(CodecOptions{.format = WireFormat::kFp16});
  EXPECT_TRUE(half.decode(half.encode(large, {2}), {2}, at::kFloat).isfinite().all().item<bool>());
  const at::Tensor small = at::full({2}, 1e-9F);
  EXPECT_EQ(half.decode(half.encode(small, {2}), {2}, at::kFloat)[0].item<float>(), 0);
  const Codec lifted(CodecOptions{.format = WireFormat::kFp16, .loss_scale = 65536});
  EXPECT_NEAR(lifted.decode(lifted.encode(small, {2}), {2}, at::kFloat)[0].item<double>(), 1e-9,
              1e-12);
}

TEST(Codec, RefusesWhatItCannotDo) {
  EXPECT_EQ(error_text([] { Codec codec(CodecOptions{.row_size = 0}); }),
            "comm.Codec: row_size is 0; a row has at least one value.");
  EXPECT_EQ(error_text([] { Codec codec(CodecOptions{.loss_scale = -1}); }),
            "comm.Codec: loss_scale is -1; give a positive number.");
  EXPECT_EQ(error_text([] { Codec().encode(at::ones({3}), {1, 1}); }),
            "comm.Codec.encode: the parts 1 1 do not add up to the 3 values.");
  EXPECT_EQ(
      error_text([] {
        Codec(CodecOptions{.format = WireFormat::kInt8}).encode(at::ones({3}, at::kLong), {3});
      }),
      "comm.Codec.encode: only floating values are compressed, not Long.");
}

}  // namespace
}  // namespace tessera::comm
