#include "kernels/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace flashcore::kernels {
namespace {

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16};

TEST(Half, EveryElementSurvivesTheRoundTrip) {
  for (DType dtype : kTypes) {
    for (uint32_t element = 0; element < 65536; ++element) {
      const float value = ToFloat(dtype, static_cast<uint16_t>(element));
      const uint16_t back = FromFloat(dtype, value);
      if (std::isnan(value)) {
        const uint32_t quiet = dtype == DType::kFloat16 ? 0x200 : 0x40;
        ASSERT_EQ(back, element | quiet);
      } else {
        ASSERT_EQ(back, element);
      }
    }
  }
}

// The definition of binary16 and bfloat16, in double.
double Decode(int exponent_bits, int mantissa_bits, uint32_t element) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(element >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double mantissa = element & ((1u << mantissa_bits) - 1);
  const double sign = element & 0x8000 ? -1 : 1;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  if (exponent == (1 << exponent_bits) - 1) {
    if (mantissa != 0) return std::numeric_limits<double>::quiet_NaN();
    return sign * std::numeric_limits<double>::infinity();
  }
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

TEST(Half, ToFloatIsTheDefinition) {
  for (uint32_t element = 0; element < 65536; ++element) {
    for (DType dtype : kTypes) {
      const double want = dtype == DType::kFloat16 ? Decode(5, 10, element) : Decode(8, 7, element);
      const float got = ToFloat(dtype, static_cast<uint16_t>(element));
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(got)) << element;
        ASSERT_EQ(std::signbit(got), (element & 0x8000) != 0);
      } else {
        ASSERT_EQ(got, want) << element;
        ASSERT_EQ(std::signbit(got), std::signbit(want)) << element;
      }
    }
  }
}

// Between every two neighbours: just below, at and just above the midpoint.
TEST(Half, RoundsToNearestEven) {
  for (DType dtype : kTypes) {
    const uint32_t infinity = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
    for (uint32_t element = 0; element + 1 < infinity; ++element) {
      const float low = ToFloat(dtype, static_cast<uint16_t>(element));
      const float high = ToFloat(dtype, static_cast<uint16_t>(element + 1));
      const float middle = low / 2 + high / 2;
      if (middle == low || middle == high) continue;  // subnormal floats: no float in between
      const uint32_t even = element + (element & 1);
      ASSERT_EQ(FromFloat(dtype, std::nextafter(middle, low)), element);
      ASSERT_EQ(FromFloat(dtype, middle), even);
      ASSERT_EQ(FromFloat(dtype, std::nextafter(middle, high)), element + 1);
      ASSERT_EQ(FromFloat(dtype, -middle), even | 0x8000);
    }
  }
}

TEST(Half, OverflowsToInfinityAndUnderflowsToZero) {
  EXPECT_EQ(FromFloat(DType::kFloat16, 65504.0f), 0x7bff);
  EXPECT_EQ(FromFloat(DType::kFloat16, 65519.996f), 0x7bff);
  EXPECT_EQ(FromFloat(DType::kFloat16, 65520.0f), 0x7c00);
  EXPECT_EQ(FromFloat(DType::kFloat16, -1e30f), 0xfc00);
  EXPECT_EQ(FromFloat(DType::kFloat16, 0x1p-25f), 0x0000);
  EXPECT_EQ(FromFloat(DType::kFloat16, 0x1.8p-25f), 0x0001);
  EXPECT_EQ(FromFloat(DType::kFloat16, -1e-30f), 0x8000);
  EXPECT_EQ(FromFloat(DType::kBFloat16, std::numeric_limits<float>::max()), 0x7f80);
  for (DType dtype : kTypes) {
    const float infinity = std::numeric_limits<float>::infinity();
    EXPECT_EQ(ToFloat(dtype, FromFloat(dtype, infinity)), infinity);
    EXPECT_EQ(ToFloat(dtype, FromFloat(dtype, -infinity)), -infinity);
    EXPECT_TRUE(std::isnan(ToFloat(dtype, FromFloat(dtype, BitsFloat(0x7f800001u)))));
  }
}

}  // namespace
}  // namespace flashcore::kernels
