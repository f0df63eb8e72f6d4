#include "kernels/fp8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace flashcore::kernels {
namespace {

constexpr uint8_t kLargest = 0x7e;  // 448

bool IsNan(uint32_t code) { return (code & 0x7f) == 0x7f; }

// The definition of E4M3, in double. Not for NaN.
double Decode(uint32_t code) {
  const int exponent = static_cast<int>(code >> 3 & 0xf);
  const double mantissa = code & 7;
  const double sign = code & 0x80 ? -1 : 1;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - 7 - 3);
  return sign * std::ldexp(mantissa + 8, exponent - 7 - 3);
}

TEST(Fp8, ToFloatIsTheDefinition) {
  for (uint32_t code = 0; code < 256; ++code) {
    const float got = E4M3ToFloat(static_cast<uint8_t>(code));
    EXPECT_EQ(std::signbit(got), (code & 0x80) != 0) << code;
    if (IsNan(code)) {
      EXPECT_TRUE(std::isnan(got)) << code;
    } else {
      EXPECT_EQ(got, Decode(code)) << code;
    }
  }
  EXPECT_EQ(E4M3ToFloat(kLargest), kE4M3Max);
  EXPECT_EQ(E4M3ToFloat(0x01), 0x1p-9f);
}

TEST(Fp8, EveryCodeSurvivesTheRoundTrip) {
  for (uint32_t code = 0; code < 256; ++code) {
    EXPECT_EQ(FloatToE4M3(E4M3ToFloat(static_cast<uint8_t>(code))), code);
  }
}

// Between every two neighbours: just below, at and just above the midpoint.
TEST(Fp8, RoundsToNearestEven) {
  for (uint32_t code = 0; code < kLargest; ++code) {
    const float low = E4M3ToFloat(static_cast<uint8_t>(code));
    const float high = E4M3ToFloat(static_cast<uint8_t>(code + 1));
    const float middle = low / 2 + high / 2;
    const uint32_t even = code + (code & 1);
    EXPECT_EQ(FloatToE4M3(std::nextafter(low, high)), code);
    EXPECT_EQ(FloatToE4M3(std::nextafter(middle, low)), code);
    EXPECT_EQ(FloatToE4M3(middle), even);
    EXPECT_EQ(FloatToE4M3(std::nextafter(middle, high)), code + 1);
    EXPECT_EQ(FloatToE4M3(-middle), even | 0x80);
  }
}

TEST(Fp8, SaturatesAndUnderflowsToZero) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (float large : {448.0f, 464.0f, 465.0f, 512.0f, 1e30f, kInfinity}) {
    EXPECT_EQ(FloatToE4M3(large), kLargest) << large;
    EXPECT_EQ(FloatToE4M3(-large), kLargest | 0x80) << large;
  }
  for (float small : {0.0f, 0x1p-10f, 1e-30f, std::numeric_limits<float>::denorm_min()}) {
    EXPECT_EQ(FloatToE4M3(small), 0) << small;
    EXPECT_EQ(FloatToE4M3(-small), 0x80) << small;
  }
}

TEST(Fp8, NanStaysNan) {
  for (uint32_t bits : {0x7fc00000u, 0x7f800001u, 0x7fffffffu}) {
    EXPECT_EQ(FloatToE4M3(BitsFloat(bits)), 0x7f);
    EXPECT_EQ(FloatToE4M3(BitsFloat(bits | 0x80000000u)), 0xff);
  }
}

}  // namespace
}  // namespace flashcore::kernels
