#include "kernels/int8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "kernels/half.h"
#include "tests/base/test_seed.h"

namespace flashcore::kernels {
namespace {

constexpr DType kBoth[] = {DType::kFloat16, DType::kBFloat16};
constexpr double kWorst = 0.5 + 0x1p-17;  // error in scales

bool IsFinite(DType dtype, uint16_t magnitude) { return std::isfinite(ToFloat(dtype, magnitude)); }

// Every magnitude of both types, as the largest of a row.
TEST(Int8, TheScaleIsTheSmallestBFloat16ThatIsLargeEnough) {
  for (const DType dtype : kBoth) {
    for (uint32_t magnitude = 1; magnitude < 0x8000; ++magnitude) {
      const auto largest = static_cast<uint16_t>(magnitude);
      const uint16_t bits = Int8Scale(dtype, largest);
      const double scale = BFloat16ToFloat(bits);
      if (!IsFinite(dtype, largest)) {
        EXPECT_TRUE(std::isnan(scale)) << magnitude;
        continue;
      }
      const double want = ToFloat(dtype, largest) / 127.0;
      ASSERT_GE(scale * (1 + 0x1p-23), want) << magnitude;
      ASSERT_LT(BFloat16ToFloat(static_cast<uint16_t>(bits - 1)), want) << magnitude;
      const int8_t code = Int8Code(ToFloat(dtype, largest), static_cast<float>(scale));
      ASSERT_GT(code, 0) << magnitude;
      ASSERT_NEAR(scale * code, ToFloat(dtype, largest), kWorst * scale) << magnitude;
      ASSERT_EQ(Int8Code(-ToFloat(dtype, largest), static_cast<float>(scale)), -code);
    }
  }
}

TEST(Int8, NormalScalesLoseLessThanAHundredthOfThePrecision) {
  for (uint32_t magnitude = 0x0400; IsFinite(DType::kFloat16, magnitude); ++magnitude) {
    const auto largest = static_cast<uint16_t>(magnitude);
    const float scale = BFloat16ToFloat(Int8Scale(DType::kFloat16, largest));
    ASSERT_GE(Int8Code(Float16ToFloat(largest), scale), 126) << magnitude;
  }
}

TEST(Int8, CodesRoundToNearestEven) {
  for (int code = -126; code <= 126; ++code) {
    const float scale = 0.75f;
    const auto middle = static_cast<float>(code + 0.5);
    EXPECT_EQ(Int8Code(scale * static_cast<float>(code), scale), code);
    EXPECT_EQ(Int8Code(scale * std::nextafter(middle, -200.0f), scale), code);
    EXPECT_EQ(Int8Code(scale * middle, scale), code + (code & 1));
    EXPECT_EQ(Int8Code(scale * std::nextafter(middle, 200.0f), scale), code + 1);
  }
}

TEST(Int8, RowsOfZerosAreZeros) {
  EXPECT_EQ(Int8Scale(DType::kFloat16, 0), 0);
  EXPECT_EQ(Int8Code(0, 0), 0);
  EXPECT_EQ(Int8Code(-0.0f, 0), 0);
}

TEST(Int8, RowsWithNanOrInfinityAreNan) {
  for (const DType dtype : kBoth) {
    for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
      const auto magnitude = static_cast<uint16_t>(FromFloat(dtype, bad) & 0x7fffu);
      EXPECT_TRUE(std::isnan(BFloat16ToFloat(Int8Scale(dtype, magnitude))));
    }
  }
  EXPECT_EQ(Int8Code(3, std::nanf("")), 0);
}

TEST(Int8, NoElementIsFartherThanHalfAScale) {
  std::mt19937_64 random(TestSeed());
  for (const DType dtype : kBoth) {
    for (int n = 0; n < 100000; ++n) {
      const auto a = static_cast<uint16_t>(random() & 0x7fffu);
      const auto b = static_cast<uint16_t>(random() & 0x7fffu);
      const uint16_t largest = std::max(a, b), element = std::min(a, b);
      if (!IsFinite(dtype, largest)) continue;
      const float scale = BFloat16ToFloat(Int8Scale(dtype, largest));
      const double read = double{scale} * Int8Code(ToFloat(dtype, element), scale);
      ASSERT_LE(std::abs(read - ToFloat(dtype, element)), kWorst * scale) << a << " " << b;
    }
  }
}

}  // namespace
}  // namespace flashcore::kernels
