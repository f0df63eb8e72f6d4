#include "kernels/oracle/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/half.h"

namespace flashcore::kernels {
namespace {

std::vector<uint16_t> Halves(const std::vector<float>& values) {
  std::vector<uint16_t> halves;
  for (float value : values) halves.push_back(FromFloat(DType::kFloat16, value));
  return halves;
}

// One head of head_dim 2, dense rows one after the other.
struct Small {
  Small(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v)
      : query(Halves(q)), key(Halves(k)), value(Halves(v)) {
    span.query = reinterpret_cast<const std::byte*>(query.data());
    span.query_rows = static_cast<int32_t>(query.size() / 2);
    span.row_stride = span.head_stride = 4;
    span.kv.key = reinterpret_cast<const std::byte*>(key.data());
    span.kv.value = reinterpret_cast<const std::byte*>(value.data());
    span.kv.rows = static_cast<int32_t>(key.size() / 2);
    span.kv.row_stride = span.kv.head_stride = 4;
    span.kv.page_stride = kPageTokens * 4;
    span.terms.softmax_scale = 1;
  }
  AttentionBatch batch() const { return {{DType::kFloat16, 1, 1, 2}, &span, 1}; }

  std::vector<uint16_t> query, key, value;
  Span span;
};

TEST(Reference, OneKeyGivesItsValue) {
  const Small small({3, -2}, {0.5, 0.25}, {7, -9});
  const AttentionResult result = ReferenceAttention(small.batch());
  EXPECT_EQ(result.output, (std::vector<double>{7, -9}));
  EXPECT_EQ(result.lse, (std::vector<double>{1.0}));  // 3 * 0.5 - 2 * 0.25
}

TEST(Reference, TwoKeysByHand) {
  Small small({1, 0}, {2, 5, 4, 5}, {10, 0, 0, 20});
  small.span.terms.softmax_scale = 0.5;  // scores 1 and 2
  const AttentionResult result = ReferenceAttention(small.batch());
  const double p = 1 / (1 + std::exp(1.0));
  EXPECT_NEAR(result.output[0], 10 * p, 1e-14);
  EXPECT_NEAR(result.output[1], 20 * (1 - p), 1e-14);
  EXPECT_NEAR(result.lse[0], std::log(std::exp(1.0) + std::exp(2.0)), 1e-14);
}

TEST(Reference, CausalMaskIsAlignedBottomRight) {
  Small small({0, 0, 0, 0, 0, 0}, {1, 1, 1, 1}, {2, 4, 6, 8});
  small.span.terms.mask = Mask::Causal();  // 3 query rows, 2 K/V rows: 0, 1 and 2 are visible
  const AttentionResult result = ReferenceAttention(small.batch());
  EXPECT_EQ(result.output, (std::vector<double>{0, 0, 2, 4, 4, 6}));
  EXPECT_EQ(result.lse[0], kNothing);
  EXPECT_EQ(result.lse[1], 0);
  EXPECT_NEAR(result.lse[2], std::log(2.0), 1e-15);
}

TEST(Reference, WindowOfNoWidthIsTheDiagonal) {
  Small small({0, 0, 0, 0}, {1, 1, 1, 1}, {2, 4, 6, 8});
  small.span.terms.mask = Mask::SlidingWindow(0, 0);
  EXPECT_EQ(ReferenceAttention(small.batch()).output, (std::vector<double>{2, 4, 6, 8}));
}

TEST(Reference, GroupedHeadsShareTheirKvHead) {
  Small small({0, 0, 0, 0, 0, 0, 0, 0}, {1, 1, 1, 1}, {2, 4, 6, 8});
  small.span.query_rows = 1;  // 4 heads over 2 KV heads of one row each
  small.span.kv.rows = 1;
  const AttentionBatch batch{{DType::kFloat16, 4, 2, 2}, &small.span, 1};
  EXPECT_EQ(ReferenceAttention(batch).output, (std::vector<double>{2, 4, 2, 4, 6, 8, 6, 8}));
}

TEST(Reference, PagesAreFollowed) {
  const std::vector<float> unused(2 * kPageTokens, 5.0f);
  std::vector<float> value = unused;  // page 0, then page 1
  value.insert(value.end(), unused.begin(), unused.end());
  value[0] = 100;
  Small small({0, 0}, std::vector<float>(4 * kPageTokens, 0.0f), value);
  const int32_t pages[] = {1, 0};
  small.span.kv.pages = pages;
  small.span.kv.rows = kPageTokens + 1;  // all of page 1 and the first row of page 0
  const AttentionResult result = ReferenceAttention(small.batch());
  EXPECT_NEAR(result.output[0], (5.0 * kPageTokens + 100) / (kPageTokens + 1), 1e-12);
}

// Two KV heads of one row each. As E4M3 1.5 is 0x3c, -2 is 0xc0, 8 is 0x50, 448 is 0x7e.
TEST(Reference, EightBitKvStandsForScaleTimesCode) {
  struct Head {
    uint8_t codes[kPageTokens][2] = {};
    uint16_t scales[kPageTokens] = {};
  };
  const auto check = [](KvDType kv_dtype, const uint8_t(&codes)[8]) {
    Head heads[4];  // K of both KV heads, V of both
    const float scales[] = {2, 0.5f, 0.25f, 1000};
    for (int h = 0; h < 4; ++h) {
      std::copy_n(codes + 2 * h, 2, heads[h].codes[0]);
      heads[h].scales[0] = FloatToBFloat16(scales[h]);
    }
    const int32_t page = 0;
    Small small({1, 0.5f, 1, 0.5f}, {0, 0}, {0, 0});
    small.span.query_rows = 1;
    KvView& kv = small.span.kv;
    kv.key = reinterpret_cast<const std::byte*>(heads);
    kv.value = reinterpret_cast<const std::byte*>(heads + 2);
    kv.pages = &page;
    kv.row_stride = 2;
    kv.head_stride = sizeof(Head);
    const AttentionBatch batch{{DType::kFloat16, 2, 2, 2, kv_dtype}, &small.span, 1};
    return ReferenceAttention(batch);
  };
  const AttentionResult e4m3 =
      check(KvDType::kFloat8E4M3, {0x3c, 0xc0, 0x3c, 0xc0, 0x50, 0x3c, 0x7e, 0xc0});
  EXPECT_EQ(e4m3.output, (std::vector<double>{2, 0.375, 448000, -2000}));
  EXPECT_EQ(e4m3.lse, (std::vector<double>{1, 0.25}));
  const AttentionResult int8 = check(KvDType::kInt8, {3, 0xfc, 3, 0xfc, 8, 1, 127, 0xfe});
  EXPECT_EQ(int8.output, (std::vector<double>{2, 0.25, 127000, -2000}));
  EXPECT_EQ(int8.lse, (std::vector<double>{2, 0.5}));
}

TEST(Reference, UnfusedRoundsEveryOperator) {
  // Scores 0 and 0 give probabilities of one half: exact. With three keys 1/3 is rounded.
  const Small two({0, 0}, {1, 1, 1, 1}, {2, 4, 6, 8});
  EXPECT_EQ(UnfusedAttention(two.batch()).output, (std::vector<double>{4, 6}));
  const Small three({0, 0}, {1, 1, 1, 1, 1, 1}, {1, 0, 0, 0, 0, 0});
  const double third = ToFloat(DType::kFloat16, FromFloat(DType::kFloat16, 1.0f / 3));
  EXPECT_EQ(UnfusedAttention(three.batch()).output[0], third);
  EXPECT_NEAR(ReferenceAttention(three.batch()).output[0], 1.0 / 3, 1e-15);
}

}  // namespace
}  // namespace flashcore::kernels
