#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "kernels/softmax_fused.h"
#include "kernels/softmax_gradient.h"
#include "kernels/softmax_statistics.h"

namespace tessera::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Case {
  Isa isa;
  Element element;
};

at::ScalarType type_of(Element element) {
  return element == Element::kFloat32   ? at::kFloat
         : element == Element::kFloat16 ? at::kHalf
                                        : at::kBFloat16;
}

class Softmax : public ::testing::TestWithParam<Case> {
 protected:
  SoftmaxStatisticsKernel statistics_kernel() const {
    return softmax_statistics_kernel(GetParam().isa);
  }
  SoftmaxGradientKernel gradient_kernel() const { return softmax_gradient_kernel(GetParam().isa); }
  at::Tensor logits(std::int64_t rows, std::int64_t columns, double spread = 4.0) const {
    at::manual_seed(11);
    return (at::randn({rows, columns}) * spread).to(type_of(GetParam().element));
  }
  LogitRows rows_of(const at::Tensor& x) const {
    return {.element = GetParam().element,
            .data = x.const_data_ptr(),
            .num_rows = x.size(0),
            .num_columns = x.size(1),
            .inner_rows = std::max<std::int64_t>(x.size(0), 1),
            .inner_stride = x.stride(0)};
  }
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const Isa isa : supported_isas()) {
    for (const Element element : {Element::kFloat32, Element::kBFloat16, Element::kFloat16}) {
      cases.push_back({isa, element});
    }
  }
  return cases;
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const char* names[] = {"", "", "", "", "", "", "float16", "bfloat16", "float32", ""};
  return std::string(name_of(info.param.isa)) + "_" + names[static_cast<int>(info.param.element)];
}

INSTANTIATE_TEST_SUITE_P(Levels, Softmax, ::testing::ValuesIn(all_cases()), case_name);

struct Outputs {
  std::vector<float> maximum, sum, target, total, weighted;
  std::vector<std::int32_t> best;
  explicit Outputs(std::int64_t rows)
      : maximum(rows), sum(rows), target(rows), total(rows), weighted(rows), best(rows) {}
  SoftmaxStatistics all() {
    return {maximum.data(), sum.data(), target.data(), total.data(), weighted.data(), best.data()};
  }
};

void expect_near(float expected, float actual, double tolerance, const std::string& what) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(actual)) << what << " is " << actual;
  } else if (std::isinf(expected)) {
    EXPECT_EQ(expected, actual) << what;
  } else {
    EXPECT_NEAR(expected, actual, tolerance * (1.0 + std::fabs(expected))) << what;
  }
}

void compare(Outputs& expected, Outputs& actual, double total_tolerance) {
  for (std::size_t r = 0; r < expected.maximum.size(); ++r) {
    const std::string row = " of row " + std::to_string(r);
    expect_near(expected.maximum[r], actual.maximum[r], 0.0, "maximum" + row);
    expect_near(expected.sum[r], actual.sum[r], 4e-7, "sum" + row);
    expect_near(expected.target[r], actual.target[r], 0.0, "target" + row);
    expect_near(expected.total[r], actual.total[r], total_tolerance, "total" + row);
    expect_near(expected.weighted[r], actual.weighted[r], 2e-6, "weighted" + row);
    EXPECT_EQ(expected.best[r], actual.best[r]) << "best" << row;
  }
}

TEST_P(Softmax, StatisticsEqualTheReferenceForEveryLength) {
  for (const std::int64_t columns :
       {0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 511, 512, 513, 1023, 1025, 2049, 5003}) {
    for (const float scale : {1.0F, 0.7F}) {
      const at::Tensor x = logits(5, columns);
      const at::Tensor labels = at::tensor({0, 100, 107, 600, -100}, at::kLong);
      Outputs expected(5);
      Outputs actual(5);
      SoftmaxStatisticsTask task{.rows = rows_of(x),
                                 .labels = {labels.const_data_ptr<std::int64_t>(), 100, -100},
                                 .scale = scale};
      task.out = expected.all();
      softmax_statistics_reference(task, 0, 5);
      task.out = actual.all();
      statistics_kernel()(task, 0, 5);
      SCOPED_TRACE("columns " + std::to_string(columns));
      compare(expected, actual, 1e-4);
    }
  }
}

TEST_P(Softmax, StatisticsOfInfiniteAndMissingNumbers) {
  at::Tensor x = logits(7, 2100);
  x.select(0, 0).fill_(-kInfinity);                               // nothing at all
  x.select(0, 1).slice(0, 0, 1500).fill_(-kInfinity);             // the leading blocks are empty
  x.select(0, 2).slice(0, 600).fill_(-kInfinity);                 // the trailing ones are
  x.select(0, 3).index_put_({at::tensor({2090})}, std::nan(""));  // in the part of a vector
  x.select(0, 4).index_put_({at::tensor({3})}, std::nan(""));     // in the first vector
  x.select(0, 5).index_put_({at::tensor({1000})}, kInfinity);
  x.select(0, 6).fill_(-kInfinity).index_put_({at::tensor({1234})}, 3.0);
  Outputs expected(7);
  Outputs actual(7);
  SoftmaxStatisticsTask task{.rows = rows_of(x)};
  task.out = expected.all();
  softmax_statistics_reference(task, 0, 7);
  task.out = actual.all();
  statistics_kernel()(task, 0, 7);
  for (int r : {0, 1, 2, 6}) {
    EXPECT_EQ(expected.maximum[r], actual.maximum[r]) << r;
    expect_near(expected.sum[r], actual.sum[r], 4e-7, "sum");
    expect_near(expected.weighted[r], actual.weighted[r], 2e-6, "weighted");
    EXPECT_EQ(expected.best[r], actual.best[r]) << r;
  }
  for (int r : {3, 4, 5}) EXPECT_TRUE(std::isnan(actual.sum[r])) << r << " " << actual.sum[r];
}

TEST_P(Softmax, IgnoredRowsMayBeSkipped) {
  const at::Tensor x = at::full({2, 40}, std::nan(""), at::kFloat).to(type_of(GetParam().element));
  const at::Tensor labels = at::tensor({-7, -7}, at::kLong);
  Outputs actual(2);
  SoftmaxStatisticsTask task{.rows = rows_of(x),
                             .labels = {labels.const_data_ptr<std::int64_t>(), 0, -7},
                             .skip_ignored = true,
                             .out = actual.all()};
  statistics_kernel()(task, 0, 2);
  EXPECT_EQ(actual.maximum[1], -kInfinity);
  EXPECT_EQ(actual.sum[1], 0.0F);
}

TEST_P(Softmax, RowsOfASliceNeedNoCopy) {
  const at::Tensor whole = logits(12, 50).view({3, 4, 50});
  const at::Tensor slice = whole.slice(1, 0, 3);
  const at::Tensor copy = slice.contiguous().view({9, 50});
  Outputs expected(9);
  Outputs actual(9);
  SoftmaxStatisticsTask task{.rows = rows_of(copy), .out = expected.all()};
  statistics_kernel()(task, 0, 9);
  task.rows = {.element = GetParam().element,
               .data = slice.const_data_ptr(),
               .num_rows = 9,
               .num_columns = 50,
               .inner_rows = 3,
               .inner_stride = 50,
               .outer_stride = 200};
  task.out = actual.all();
  statistics_kernel()(task, 0, 9);
  EXPECT_EQ(expected.sum, actual.sum);
  EXPECT_EQ(expected.maximum, actual.maximum);
}

struct GradientInput {
  std::vector<float> maximum{4.0F, 5.0F, 6.5F, 3.0F};
  std::vector<float> softmax{0.5F, -0.25F, 0.0F, 1.0F};
  std::vector<float> weighted{0.0F, 0.3F, 0.0F, -0.1F};
  std::vector<float> uniform{0.0F, -0.01F, 0.0F, 0.002F};
  std::vector<float> target{-0.5F, 0.25F, 0.0F, 0.0F};
  std::vector<std::int64_t> labels{103, 99, 101, 100};
};

TEST_P(Softmax, GradientEqualsTheReferenceForEveryLength) {
  const GradientInput input;
  // One rounding of the result, and float32's own error before it.
  const double relative = GetParam().element == Element::kFloat32    ? 1e-6
                          : GetParam().element == Element::kBFloat16 ? 1.0 / 128
                                                                     : 1.0 / 1024;
  for (const std::int64_t columns : {1, 4, 7, 8, 15, 16, 17, 31, 33, 511, 513, 1025, 5003}) {
    for (const bool weighted : {false, true}) {
      for (const Store store : {Store::kCached, Store::kStreaming}) {
        const at::Tensor x = logits(4, columns, 1.5);
        const std::int64_t num_written = columns + 3;
        at::Tensor expected = at::full({4, num_written}, 7.0, x.options());
        at::Tensor actual = at::full({4, num_written}, 7.0, x.options());
        SoftmaxGradientTask task{.rows = rows_of(x),
                                 .labels = {input.labels.data(), 100, -100},
                                 .scale = 0.9F,
                                 .coefficients = {input.maximum.data(), input.softmax.data(),
                                                  weighted ? input.weighted.data() : nullptr,
                                                  input.uniform.data(), input.target.data()},
                                 .num_written = num_written,
                                 .inner_stride = num_written,
                                 .store = store};
        task.gradient = expected.mutable_data_ptr();
        softmax_gradient_reference(task, 0, 4);
        task.gradient = actual.mutable_data_ptr();
        gradient_kernel()(task, 0, 4);
        ASSERT_TRUE(at::allclose(expected.to(at::kFloat), actual.to(at::kFloat), relative, 1e-7))
            << columns << "\n"
            << (expected.to(at::kFloat) - actual.to(at::kFloat)).abs().max();
      }
    }
  }
}

TEST_P(Softmax, GradientInPlaceAndOfInfiniteLogits) {
  const GradientInput input;
  at::Tensor x = logits(4, 77, 1.5);
  x.slice(1, 0, 40).fill_(-kInfinity);
  at::Tensor expected = at::empty_like(x);
  SoftmaxGradientTask task{
      .rows = rows_of(x),
      .labels = {input.labels.data(), 100, -100},
      .coefficients = {input.maximum.data(), input.softmax.data(), input.weighted.data(),
                       input.uniform.data(), input.target.data()},
      .gradient = expected.mutable_data_ptr(),
      .num_written = 77,
      .inner_stride = 77};
  softmax_gradient_reference(task, 0, 4);
  task.gradient = x.mutable_data_ptr();
  gradient_kernel()(task, 0, 4);
  EXPECT_TRUE(at::isfinite(x).all().item<bool>());
  EXPECT_TRUE(at::allclose(expected.to(at::kFloat), x.to(at::kFloat), 1.0 / 128, 1e-7));
}

TEST_P(Softmax, FusedEqualsTheReferenceForEveryLength) {
  const double relative = GetParam().element == Element::kFloat32    ? 2e-6
                          : GetParam().element == Element::kBFloat16 ? 1.0 / 128
                                                                     : 1.0 / 1024;
  for (const std::int64_t columns : {1, 7, 8, 15, 16, 17, 33, 511, 512, 513, 1024, 1025, 5003}) {
    at::Tensor expected = logits(5, columns);
    expected[3].slice(0, 0, columns / 2).fill_(-kInfinity);
    at::Tensor actual = expected.clone();
    const std::vector<std::int64_t> labels{100, 103, -100, 99 + columns, 5000000};
    Outputs of_expected(5);
    Outputs of_actual(5);
    SoftmaxFusedTask task{.statistics = {.rows = rows_of(expected),
                                         .labels = {labels.data(), 100, -100},
                                         .scale = 0.9F,
                                         .skip_ignored = true},
                          .z_loss = 1e-3,
                          .weight = 0.25F};
    task.statistics.out = {of_expected.maximum.data(), of_expected.sum.data(),
                           of_expected.target.data()};
    softmax_fused_reference(task, 0, 5, nullptr);
    task.statistics.rows = rows_of(actual);
    task.statistics.out = {of_actual.maximum.data(), of_actual.sum.data(), of_actual.target.data()};
    const at::Tensor workspace = at::empty({softmax_fused_workspace(columns)}, at::kFloat);
    softmax_fused_kernel(GetParam().isa)(task, 0, 5, workspace.data_ptr<float>());
    SCOPED_TRACE("columns " + std::to_string(columns));
    compare(of_expected, of_actual, 0.0);
    ASSERT_TRUE(at::allclose(expected.to(at::kFloat), actual.to(at::kFloat), relative, 1e-7))
        << (expected.to(at::kFloat) - actual.to(at::kFloat)).abs().max();
  }
}

/// Rows on which the sums must be moved: maxima that rise by much or by little, fall, are huge, or
/// come after blocks without any.
at::Tensor wandering(at::ScalarType type) {
  constexpr std::int64_t kColumns = 5003;
  at::manual_seed(5);
  at::Tensor x = at::randn({12, kColumns});
  const at::Tensor place = at::arange(kColumns, at::kFloat) / 512;
  const float huge = type == at::kHalf ? 60000.0F : 1e30F;
  x[0] += place * 40;
  x[1] += place * 5;
  x[2] -= place * 40;
  x[3] = at::where(place < 3, -kInfinity, x[3] - 300);
  x[4] += 2500;  // far from 0, where x log2(e) is large beside its distances
  x[5] = at::where(place < 5, x[5], x[5] + 60000);
  x[6].fill_(huge);
  x[6].slice(0, 0, 2000).fill_(-huge);
  x[7] *= huge / 8;
  x[8] -= 60000;
  x[9] += place * 0.4;
  x[10].fill_(-3.0);
  x[10][4321] = 25.0;  // nearly all there is
  x[11] *= 1e-3;
  return x.to(type);
}

TEST_P(Softmax, StatisticsFollowTheMaximum) {
  const at::Tensor x = wandering(type_of(GetParam().element));
  const std::int64_t rows = x.size(0);
  for (const float scale : {1.0F, 0.3F, 100.0F, 1e-3F}) {
    Outputs expected(rows);
    Outputs actual(rows);
    SoftmaxStatisticsTask task{.rows = rows_of(x), .scale = scale, .out = expected.all()};
    softmax_statistics_reference(task, 0, rows);
    task.out = actual.all();
    statistics_kernel()(task, 0, rows);
    SCOPED_TRACE("scale " + std::to_string(scale));
    for (auto* outputs : {&expected, &actual}) {
      outputs->total.assign(outputs->total.size(), 0.0F);  // of huge numbers it may be anything
    }
    compare(expected, actual, 0.0);
    // The sums alone take another way.
    Outputs alone(rows);
    task.out = {alone.maximum.data(), alone.sum.data()};
    statistics_kernel()(task, 0, rows);
    for (std::int64_t r = 0; r < rows; ++r) {
      EXPECT_EQ(expected.maximum[r], alone.maximum[r]) << r;
      expect_near(expected.sum[r], alone.sum[r], 4e-7, "sum alone of row " + std::to_string(r));
    }
  }
}

TEST_P(Softmax, SumsOfFewColumnsAreExactWhereOneCounts) {
  for (const float maximum : {0.0F, 0.7F, -31.25F, 1000.0F, 12345.0F}) {
    for (const std::int64_t columns : {1, 9, 700}) {
      at::Tensor x = at::full({1, columns}, maximum - 200.0F, at::kFloat);
      x[0][columns / 2] = maximum;
      x = x.to(type_of(GetParam().element));
      Outputs actual(1);
      SoftmaxStatisticsTask task{.rows = rows_of(x), .out = actual.all()};
      statistics_kernel()(task, 0, 1);
      EXPECT_EQ(actual.sum[0], 1.0F) << maximum << " of " << columns;
      EXPECT_EQ(actual.weighted[0], 0.0F) << maximum << " of " << columns;
    }
  }
}

TEST_P(Softmax, FusedFollowsTheMaximum) {
  at::Tensor expected = wandering(type_of(GetParam().element));
  at::Tensor actual = expected.clone();
  const std::int64_t rows = expected.size(0);
  const std::vector<std::int64_t> labels{0, 5002, 3, 4000, 77, 5000, 4999, 600, 1, 2, 4321, 5};
  const at::Tensor workspace = at::empty({softmax_fused_workspace(expected.size(1))}, at::kFloat);
  Outputs of_expected(rows);
  Outputs of_actual(rows);
  SoftmaxFusedTask task{.statistics = {.rows = rows_of(expected), .labels = {labels.data()}}};
  task.statistics.out = {of_expected.maximum.data(), of_expected.sum.data(),
                         of_expected.target.data()};
  softmax_fused_reference(task, 0, rows, nullptr);
  task.statistics.rows = rows_of(actual);
  task.statistics.out = {of_actual.maximum.data(), of_actual.sum.data(), of_actual.target.data()};
  softmax_fused_kernel(GetParam().isa)(task, 0, rows, workspace.data_ptr<float>());
  compare(of_expected, of_actual, 0.0);
  const double relative = GetParam().element == Element::kFloat32    ? 2e-6
                          : GetParam().element == Element::kBFloat16 ? 1.0 / 128
                                                                     : 1.0 / 1024;
  EXPECT_TRUE(at::allclose(expected.to(at::kFloat), actual.to(at::kFloat), relative, 1e-7))
      << (expected.to(at::kFloat) - actual.to(at::kFloat)).abs().max();
}

TEST_P(Softmax, GradientOfTheSoftmaxAloneIsRoundedOnce) {
  // Half a unit in the last place of the type, and the error of the exponential.
  const double relative = GetParam().element == Element::kFloat32    ? 4e-7
                          : GetParam().element == Element::kBFloat16 ? 1.0 / 256 + 1e-4
                                                                     : 1.0 / 2048 + 1e-5;
  const double smallest = GetParam().element == Element::kFloat16 ? 0x1p-24 : 0x1p-126;
  const std::vector<float> maxima{3.0F, -200.0F, 340.0F, 900.0F, 0.0F, 2.0F, 2.0F, 2.0F, -3.0F};
  const std::vector<float> softmax{0.5F,   -0.25F, 4.9e-4F, 1.0F, -3e-7F,
                                   1e-30F, 1e20F,  1e-40F,  7.0F};
  const std::vector<float> zeros(9, 0.0F);
  const std::vector<std::int64_t> labels(9, -100);
  for (const float scale : {1.0F, 0.6F}) {
    at::Tensor x = logits(9, 3001, 1.0).to(at::kFloat);
    x = x * 3 - at::arange(3001, at::kFloat) / 25;  // down to where nothing is left
    for (int r = 0; r < 9; ++r) x[r] += maxima[r] - x[r].max().item<float>();
    x.slice(1, 100, 104).fill_(-kInfinity);
    x.select(1, 200).fill_(std::nan(""));
    x = x.to(type_of(GetParam().element));
    at::Tensor actual = at::empty_like(x);
    SoftmaxGradientTask task{
        .rows = rows_of(x),
        .labels = {labels.data()},
        .scale = scale,
        .coefficients = {maxima.data(), softmax.data(), nullptr, zeros.data(), zeros.data()},
        .gradient = actual.mutable_data_ptr(),
        .num_written = 3001,
        .inner_stride = 3001};
    gradient_kernel()(task, 0, 9);
    EXPECT_TRUE((actual.slice(1, 100, 104) == 0).all().item<bool>());
    EXPECT_TRUE(actual.select(1, 200).isnan().all().item<bool>());
    const at::Tensor of = at::tensor(softmax).to(at::kDouble).unsqueeze(1);
    const at::Tensor distance =
        (x.to(at::kDouble) - at::tensor(maxima).to(at::kDouble).unsqueeze(1)) *
        static_cast<double>(scale);
    const at::Tensor exact = of * distance.exp();
    const double largest = GetParam().element == Element::kFloat16 ? 60000.0 : 1e38;
    // An exponential below the smallest normal number is 0.
    const at::Tensor lost = of.abs().clamp_min(1.0) * smallest;
    // scale (x - maximum) is rounded twice in float32, which the exponential multiplies.
    const at::Tensor allowed = exact.abs() * (distance.abs() * 0x1p-23 + relative) + lost;
    const at::Tensor error = (actual.to(at::kDouble) - exact).abs() / allowed;
    for (int r = 0; r < 9; ++r) {
      if (std::fabs(softmax[r]) > largest) continue;
      EXPECT_LE(error[r].nan_to_num(0.0).max().item<double>(), 1.0) << "row " << r;
    }
  }
}

TEST_P(Softmax, NoPayloadHidesAMissingNumber) {
  if (GetParam().element != Element::kFloat32) GTEST_SKIP() << "for 32 bits";
  for (const std::uint32_t bits :
       {0x7F800001U, 0x7FFFFFFFU, 0xFFC00000U, 0xFFFFFFFFU, 0xFF8001FFU}) {
    at::Tensor x = logits(1, 40);
    static_cast<std::uint32_t*>(x.data_ptr())[17] = bits;
    Outputs actual(1);
    SoftmaxStatisticsTask task{.rows = rows_of(x), .out = actual.all()};
    statistics_kernel()(task, 0, 1);
    EXPECT_TRUE(std::isnan(actual.sum[0])) << std::hex << bits;
    const float one = 1.0F;
    const float zero = 0.0F;
    at::Tensor gradient = at::empty_like(x);
    const SoftmaxGradientTask of{
        .rows = rows_of(x),
        .coefficients = {actual.maximum.data(), &one, nullptr, &zero, &zero},
        .gradient = gradient.mutable_data_ptr(),
        .num_written = 40,
        .inner_stride = 40};
    gradient_kernel()(of, 0, 1);
    EXPECT_EQ(gradient.isnan().sum().item<std::int64_t>(), 1) << std::hex << bits;
  }
}

}  // namespace
}  // namespace tessera::kernels
