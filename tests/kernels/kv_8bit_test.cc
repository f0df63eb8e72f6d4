#include "kernels/kv_8bit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/half.h"
#include "kernels/kernel.h"
#include "tests/base/test_seed.h"

namespace flashcore::kernels {
namespace {

constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16};

bool IsFinite(DType dtype, uint16_t magnitude) { return std::isfinite(ToFloat(dtype, magnitude)); }

class Kv8BitTest : public testing::TestWithParam<KvDType> {
 protected:
  static std::byte Code(float element, float scale) {
    return GetParam() == KvDType::kInt8 ? CodeOf<KvDType::kInt8>(element, scale)
                                        : CodeOf<KvDType::kFloat8E4M3>(element, scale);
  }
  // A code as a number.
  static double Number(float element, float scale) {
    return CodeToFloat(GetParam(), Code(element, scale));
  }
  static double Largest() { return GetParam() == KvDType::kInt8 ? 127 : 448; }
  // The largest error of an element, from the definition: half the distance of two codes, and the
  // rounding of the division.
  static double WorstError(float element, float scale) {
    if (GetParam() == KvDType::kInt8) return (0.5 + 0x1p-17) * scale;
    return std::max(0x1p-10 * scale, std::abs(element) / 16.0) * (1 + 0x1p-20);
  }
  // The largest number that a row of this type may be read as: the largest code times the largest
  // BFloat16 with which that is not beyond the type's numbers.
  static double LargestRead(DType dtype) {
    if (dtype == DType::kFloat16) return GetParam() == KvDType::kInt8 ? 127 * 512 : 448 * 146;
    return GetParam() == KvDType::kInt8 ? 127 * 0x1p121 : 448 * 145 * 0x1p112;
  }
};

// Every magnitude of both types, as the largest of a row.
TEST_P(Kv8BitTest, TheScaleIsTheSmallestBFloat16ThatIsLargeEnough) {
  for (const DType dtype : kDTypes) {
    for (uint32_t magnitude = 1; magnitude < 0x8000; ++magnitude) {
      const auto largest = static_cast<uint16_t>(magnitude);
      const uint16_t bits = ScaleOfRow(GetParam(), dtype, largest);
      const double scale = BFloat16ToFloat(bits);
      if (!IsFinite(dtype, largest)) {
        EXPECT_TRUE(std::isnan(scale)) << magnitude;
        continue;
      }
      if (ToFloat(dtype, largest) > LargestRead(dtype)) continue;
      const double want = ToFloat(dtype, largest) / Largest();
      ASSERT_GE(scale * (1 + 0x1p-23), want) << magnitude;
      ASSERT_LT(BFloat16ToFloat(static_cast<uint16_t>(bits - 1)), want) << magnitude;
      const float element = ToFloat(dtype, largest);
      const double number = Number(element, static_cast<float>(scale));
      ASSERT_GT(number, 0) << magnitude;
      ASSERT_LE(number, Largest()) << magnitude;
      ASSERT_NEAR(scale * number, element, WorstError(element, static_cast<float>(scale)))
          << magnitude;
      ASSERT_EQ(Number(-element, static_cast<float>(scale)), -number);
    }
  }
}

TEST_P(Kv8BitTest, WhatIsFiniteIsReadAsFinite) {
  for (const DType dtype : kDTypes) {
    int beyond = 0;
    for (uint32_t magnitude = 1; IsFinite(dtype, static_cast<uint16_t>(magnitude)); ++magnitude) {
      const auto largest = static_cast<uint16_t>(magnitude);
      const float element = ToFloat(dtype, largest);
      const float scale = BFloat16ToFloat(ScaleOfRow(GetParam(), dtype, largest));
      const double read = scale * Number(element, scale);
      ASSERT_TRUE(IsFinite(dtype, FromFloat(dtype, static_cast<float>(read)))) << magnitude;
      ASSERT_EQ(Number(-element, scale) * scale, -read) << magnitude;
      if (element <= LargestRead(dtype)) continue;
      ASSERT_EQ(read, LargestRead(dtype)) << magnitude;
      ASSERT_GE(read, element * (1 - 1.0 / 128)) << magnitude;
      ++beyond;
    }
    EXPECT_GT(beyond, 0);
  }
}

TEST_P(Kv8BitTest, NormalScalesLoseLessThanAHundredthOfThePrecision) {
  for (uint32_t magnitude = 0x0400; IsFinite(DType::kFloat16, magnitude); ++magnitude) {
    const auto largest = static_cast<uint16_t>(magnitude);
    const float scale = BFloat16ToFloat(ScaleOfRow(GetParam(), DType::kFloat16, largest));
    ASSERT_GE(Float16ToFloat(largest) / scale, 0.992 * Largest()) << magnitude;
  }
}

// Between every two neighbours: at, just below, at and just above their middle.
TEST_P(Kv8BitTest, CodesRoundToNearestEven) {
  constexpr float kScale = 0.5f;
  for (int n = 0; n < (GetParam() == KvDType::kInt8 ? 127 : 0x7e); ++n) {
    const std::byte code{static_cast<uint8_t>(n)}, next{static_cast<uint8_t>(n + 1)};
    const float low = CodeToFloat(GetParam(), code), high = CodeToFloat(GetParam(), next);
    const float middle = low / 2 + high / 2;
    const std::byte even = n % 2 == 0 ? code : next;
    EXPECT_EQ(Code(kScale * low, kScale), code);
    EXPECT_EQ(Code(kScale * std::nextafter(middle, -500.0f), kScale), code);
    EXPECT_EQ(Code(kScale * middle, kScale), even);
    EXPECT_EQ(Code(kScale * std::nextafter(middle, 500.0f), kScale), next);
    EXPECT_EQ(Number(-kScale * middle, kScale), -CodeToFloat(GetParam(), even));
  }
}

TEST_P(Kv8BitTest, RowsOfZerosAreZeros) {
  EXPECT_EQ(ScaleOfRow(GetParam(), DType::kFloat16, 0), 0);
  EXPECT_EQ(Code(0, 0), std::byte{0});
  EXPECT_EQ(Code(-0.0f, 0), std::byte{0});
}

TEST_P(Kv8BitTest, RowsWithNanOrInfinityAreNan) {
  for (const DType dtype : kDTypes) {
    for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
      const auto magnitude = static_cast<uint16_t>(FromFloat(dtype, bad) & 0x7fffu);
      EXPECT_TRUE(std::isnan(BFloat16ToFloat(ScaleOfRow(GetParam(), dtype, magnitude))));
    }
  }
  EXPECT_EQ(Code(3, std::nanf("")), std::byte{0});
}

TEST_P(Kv8BitTest, NoElementIsFartherThanHalfAStep) {
  std::mt19937_64 random(TestSeed());
  for (const DType dtype : kDTypes) {
    for (int n = 0; n < 100000; ++n) {
      const auto a = static_cast<uint16_t>(random() & 0x7fffu);
      const auto b = static_cast<uint16_t>(random() & 0x7fffu);
      const uint16_t largest = std::max(a, b);
      if (!IsFinite(dtype, largest)) continue;
      const float element = ToFloat(dtype, std::min(a, b));
      const float scale = BFloat16ToFloat(ScaleOfRow(GetParam(), dtype, largest));
      const double read = scale * Number(element, scale);
      const double want = std::min<double>(element, LargestRead(dtype));
      ASSERT_LE(std::abs(read - want), WorstError(element, scale)) << a << " " << b;
    }
  }
}

// Whatever the other rows of the page are.
TEST_P(Kv8BitTest, ARowIsReadAsItWasStored) {
  std::mt19937_64 random(TestSeed());
  const PageLayout layout{DType::kFloat16, 3, 64, GetParam()};
  std::vector<std::byte> page(layout.value_offset(), std::byte{0xff});
  const int32_t number = 0;
  KvView kv;
  kv.key = page.data();
  kv.pages = &number;
  kv.head_stride = layout.head_bytes();
  kv.row_stride = layout.row_bytes();
  for (const auto& [head, row] : {std::pair{0, 0}, {2, 63}, {1, 17}}) {
    std::vector<uint16_t> elements(layout.head_dim);
    for (uint16_t& element : elements) element = random() & 0xbfffu;
    Store8BitRow(layout, reinterpret_cast<const std::byte*>(elements.data()), head, row,
                 page.data());
    const float scale = RowScale(kv, kv.key, head, row);
    const std::byte* const codes =
        page.data() + head * layout.head_bytes() + row * layout.row_bytes();
    for (int32_t d = 0; d < layout.head_dim; ++d) {
      const float element = Float16ToFloat(elements[d]);
      ASSERT_LE(std::abs(scale * CodeToFloat(GetParam(), codes[d]) - element),
                WorstError(element, scale));
    }
    EXPECT_TRUE(std::isnan(RowScale(kv, kv.key, head, row ^ 1))) << "another row";
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Kv8BitTest, testing::Values(KvDType::kInt8, KvDType::kFloat8E4M3),
                         [](const auto& type) { return std::string(Name(type.param)); });

}  // namespace
}  // namespace flashcore::kernels
