// The replies that verify and bench accept.
#include "client/bench/reply_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/flag_types.h"
#include "gtest/gtest.h"
#include "kernels/half.h"
#include "kernels/kv_8bit.h"
#include "kernels/oracle/reference.h"

namespace flashcore::cli {
namespace {

// Writes what unfused attention answers to the outputs of `batch`.
void AnswerUnfused(const KernelBatch& batch) {
  kernels::StoreResult(kernels::UnfusedAttention(batch.view()), batch.view());
}

// Answers `problem` as unfused attention would.
void AnswerUnfused(RandomRequest* problem) { AnswerUnfused(ToKernelBatch(problem->request())); }

TEST(OracleTest, AcceptsUnfusedAttentionAndNoticesErrors) {
  std::mt19937_64 random(1);
  for (const Layout layout : {Layout::kNHD, Layout::kHND}) {
    for (const Mask& mask : {Mask::None(), Mask::Causal(), Mask::SlidingWindow(3, 1)}) {
      AttendRequest shape;
      shape.spans = {{5, 9}, {3, 0}, {7, 4}};
      shape.num_heads = 4;
      shape.num_kv_heads = 2;
      shape.head_dim = 32;
      shape.layout = layout;
      shape.mask = mask;
      RandomRequest problem(shape, /*want_lse=*/true, 1, &random);
      EXPECT_FALSE(Compare(ToKernelBatch(problem.request())).Within(2)) << "NaN must not pass";
      AnswerUnfused(&problem);
      EXPECT_TRUE(Compare(ToKernelBatch(problem.request())).Within(1.01));
      EXPECT_TRUE(Compare(ToKernelBatch(problem.request())).WithinBound(2e-2, 3e-2));
      EXPECT_TRUE(Compare(SpotCheckBatch(ToKernelBatch(problem.request()), 7)).Within(1.01));
      uint16_t& element = problem.output()[40];
      const uint16_t right = element;
      element = kNanBits;
      EXPECT_FALSE(Compare(ToKernelBatch(problem.request())).Within(2));
      EXPECT_FALSE(Compare(ToKernelBatch(problem.request())).WithinBound(2e-2, 3e-2));
      element = kernels::FloatToFloat16(3);
      EXPECT_FALSE(Compare(ToKernelBatch(problem.request())).Within(2));
      EXPECT_FALSE(Compare(SpotCheckBatch(ToKernelBatch(problem.request()), 7)).Within(4));
      element = right;
      problem.request().lse.back() += 0.5f;
      EXPECT_FALSE(Compare(ToKernelBatch(problem.request())).WithinBound(2e-2, 3e-2));
      EXPECT_FALSE(Compare(ToKernelBatch(problem.request())).Within(2));
    }
  }
}

TEST(OracleTest, Compares8BitSequencesWithTheirStoredRows) {
  std::mt19937_64 random(5);
  AttendRequest shape;
  shape.spans = {{3, 200}, {1, 65}};
  shape.num_heads = 4;
  shape.num_kv_heads = 2;
  shape.head_dim = 64;
  for (const Layout layout : {Layout::kNHD, Layout::kHND}) {
    shape.layout = layout;
    RandomRequest problem(shape, /*want_lse=*/true, 1, &random);
    AnswerUnfused(&problem);
    const KernelBatch plain = ToKernelBatch(problem.request());
    EXPECT_TRUE(Compare(AsStored(plain, KvDType::kSameAsQuery)).result == Compare(plain).result);
    for (const KvDType kv_dtype : {KvDType::kInt8, KvDType::kFloat8E4M3}) {
      AnswerUnfused(&problem);
      EXPECT_FALSE(Compare(AsStored(plain, kv_dtype)).Within(4)) << "it was not 8-bit";
      const KernelBatch stored = AsStored(plain, kv_dtype);
      AnswerUnfused(stored);
      EXPECT_TRUE(Compare(stored).Within(1.01));
      EXPECT_TRUE(SpotCheck(stored));
      EXPECT_FALSE(SpotCheck(plain));
    }
  }
}

// The error in an answer.
struct Fault {
  double query_scale = 1;  // factor of the scales of Q
  int lost_rows = 0;       // the last rows of K/V
};

// Answers a batch over INT8 K/V, without masks, with products of codes as its precision says.
void AnswerWithCodes(const KernelBatch& batch, const Fault& fault = {}) {
  const kernels::Geometry& g = batch.geometry;
  const auto dims = static_cast<size_t>(g.head_dim);
  for (const kernels::Span& span : batch.spans) {
    const int32_t rows = span.kv.rows - fault.lost_rows;
    const auto codes = [&](const std::byte* tensor, int32_t head, int32_t j) {
      return tensor + span.kv.pages[j / 64] * span.kv.page_stride + head * span.kv.head_stride +
             j % 64 * span.kv.row_stride;
    };
    for (int32_t i = 0; i < span.query_rows; ++i) {
      for (int32_t h = 0; h < g.num_heads; ++h) {
        const int32_t kv_head = h / g.group();
        std::vector<double> query(dims), weights(static_cast<size_t>(rows));
        double largest = 0, max = -1e300, sum = 0;
        for (size_t d = 0; d < dims; ++d) {
          uint16_t bits = 0;
          std::memcpy(&bits, span.query + i * span.row_stride + h * span.head_stride + d * 2, 2);
          query[d] = kernels::ToFloat(g.dtype, bits);
          largest = std::max(largest, std::abs(query[d]));
        }
        const double scale = largest / 127;
        for (double& q : query) q = std::rint(q / scale) * scale * fault.query_scale;
        for (int32_t j = 0; j < rows; ++j) {
          const std::byte* const k = codes(span.kv.key, kv_head, j);
          double dot = 0;
          for (size_t d = 0; d < dims; ++d) dot += query[d] * std::to_integer<int8_t>(k[d]);
          const double score = dot * kernels::RowScale(span.kv, span.kv.key, kv_head, j);
          weights[static_cast<size_t>(j)] = span.terms.Score(score);
          max = std::max(max, weights[static_cast<size_t>(j)]);
        }
        for (int32_t j = 0; j < rows; ++j) {
          double& weight = weights[static_cast<size_t>(j)];
          sum += weight = std::exp(weight - max);
          weight *= kernels::RowScale(span.kv, span.kv.value, kv_head, j);
        }
        for (size_t tile = 0; tile < weights.size(); tile += 64) {
          if (g.precision != kernels::Precision::kInt8QkPv) break;
          const auto first = weights.begin() + static_cast<ptrdiff_t>(tile);
          const auto last = first + std::min<ptrdiff_t>(64, weights.end() - first);
          const double step = *std::max_element(first, last) / 255;
          for (auto weight = first; weight != last; ++weight) {
            *weight = std::rint(*weight / step) * step;
          }
        }
        for (size_t d = 0; d < dims; ++d) {
          double output = 0;
          for (int32_t j = 0; j < rows; ++j) {
            output += weights[static_cast<size_t>(j)] *
                      std::to_integer<int8_t>(codes(span.kv.value, kv_head, j)[d]);
          }
          const uint16_t bits = kernels::FromFloat(g.dtype, static_cast<float>(output / sum));
          std::memcpy(span.output + i * span.row_stride + h * span.head_stride + d * 2, &bits, 2);
        }
        span.lse[i * span.lse_row_stride + h * span.lse_head_stride] =
            static_cast<float>(max + std::log(sum));
      }
    }
  }
}

// Answers to a request with `spans`, right and wrong ones, in products of codes and in others.
void CheckProductsOfCodes(const std::vector<SpanShape>& spans, float softmax_scale,
                          Precision precision, std::mt19937_64* random) {
  AttendRequest shape;
  shape.spans = spans;
  shape.num_heads = 4;
  shape.num_kv_heads = 2;
  shape.head_dim = 64;
  shape.softmax_scale = softmax_scale;
  RandomRequest problem(shape, /*want_lse=*/true, 1, random);
  const KernelBatch plain = ToKernelBatch(problem.request());
  const KernelBatch accepts = AsStored(plain, KvDType::kInt8, precision);
  AnswerUnfused(accepts);
  EXPECT_TRUE(Compare(accepts).Within(2)) << "it may be more precise";
  AnswerWithCodes(accepts);
  EXPECT_TRUE(Compare(accepts).Within(2)) << Compare(accepts).RmsRatio();
  EXPECT_TRUE(SpotCheck(accepts));
  if (spans[0].kv_rows < 65 || softmax_scale != 0.125f) return;
  EXPECT_FALSE(Compare(AsStored(plain, KvDType::kInt8)).Within(2)) << "it accepts 16 bits";
  AnswerWithCodes(accepts, {/*query_scale=*/17.0 / 16});
  EXPECT_FALSE(Compare(accepts).Within(2));
  AnswerWithCodes(accepts, {/*query_scale=*/1, /*lost_rows=*/1});
  EXPECT_FALSE(Compare(accepts).Within(2));
}

TEST(OracleTest, AllowsForProductsOfCodesWhatTheyCostAndNoMore) {
  std::mt19937_64 random(6);
  const std::vector<SpanShape> requests[] = {{{1, 1}}, {{1, 2}}, {{3, 200}, {1, 65}}, {{1, 2000}}};
  for (const std::vector<SpanShape>& spans : requests) {
    for (const float softmax_scale : {0.0f, 0.125f, 0.5f}) {
      for (const Precision precision : {Precision::kInt8Qk, Precision::kInt8QkPv}) {
        SCOPED_TRACE(absl::StrCat(spans[0].kv_rows, " rows, scale ", softmax_scale, ", ",
                                  AbslUnparseFlag(precision)));
        CheckProductsOfCodes(spans, softmax_scale, precision, &random);
      }
    }
  }
}

TEST(OracleTest, OnlyInt8HasProductsOfCodes) {
  AttendRequest shape;
  shape.spans = {{1, 1}};
  shape.num_heads = shape.num_kv_heads = 1;
  shape.head_dim = 64;
  std::mt19937_64 random(1);
  RandomRequest problem(shape, /*want_lse=*/false, 1, &random);
  const KernelBatch plain = ToKernelBatch(problem.request());
  for (const KvDType kv_dtype : {KvDType::kSameAsQuery, KvDType::kFloat8E4M3}) {
    EXPECT_EQ(AsStored(plain, kv_dtype, Precision::kInt8QkPv).geometry.precision,
              kernels::Precision::k16Bit);
  }
}

TEST(OracleTest, NoticesARowLostOfThousandsByTheRootMeanSquare) {
  std::mt19937_64 random(4);  // with most seeds the largest error shows it too
  AttendRequest shape;
  shape.spans = {{1, 16000}};
  shape.dtype = DType::kBFloat16;
  shape.num_heads = 4;
  shape.num_kv_heads = 1;
  shape.head_dim = 64;
  RandomRequest problem(shape, /*want_lse=*/true, 1, &random);
  const AttendRequest whole = problem.request();
  problem.request().spans[0].kv_rows -= 1;  // answers without the last row
  AnswerUnfused(&problem);
  const Errors errors = Compare(ToKernelBatch(whole));
  EXPECT_LT(errors.result, 2 * errors.unfused) << "the largest error alone does not show it";
  EXPECT_FALSE(errors.Within(2));
}

TEST(OracleTest, ErrorsOfUnfusedAttentionAreNoExcuseForAnything) {
  std::mt19937_64 random(1);
  AttendRequest shape;
  shape.spans = {{100, 300}};
  shape.dtype = DType::kBFloat16;
  shape.num_heads = shape.num_kv_heads = 2;
  shape.head_dim = 64;
  RandomRequest problem(shape, /*want_lse=*/false, 16, &random);
  std::fill(problem.output().begin(), problem.output().end(), uint16_t{0});
  const Errors errors = Compare(ToKernelBatch(problem.request()));
  EXPECT_GT(errors.unfused, 1) << "it rounds scores of hundreds to 8 bits";
  EXPECT_FALSE(errors.Within(1000));
}

}  // namespace
}  // namespace flashcore::cli
