// The error of FP8 K/V against float64 attention over the unquantised K/V: with a perfect kernel,
// and with every kernel of the registry that reads FP8. attention_test.cc compares kernels with
// attention over the quantised K/V.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "kernels/half.h"
#include "kernels/reference.h"
#include "kernels/registry.h"
#include "tests/base/test_seed.h"
#include "tests/kernels/attention_fixture.h"
#include "tests/kernels/problem.h"

namespace flashcore::kernels {
namespace {

constexpr int32_t kHeads = 8;
constexpr int32_t kLoudHead = 3;
// Only the last rows of a prefill are compared with the oracle, because float64 attention is slow.
constexpr int32_t kCheckedRows = 4;

struct Fp8Case {
  const char* name;
  int32_t query_rows;
  int32_t kv_rows;
};
constexpr Fp8Case kCases[] = {{"prefill_512", 512, 512},
                              {"prefill_2048", 2048, 2048},
                              {"decode_512", 1, 512},
                              {"decode_2048", 1, 2048}};

Problem MakeProblem(const Geometry& geometry, const Fp8Case& fp8, int32_t loud_kv_head,
                    std::mt19937_64* random) {
  SpanShape shape{fp8.query_rows, fp8.kv_rows, Mask::Causal()};
  shape.loud_kv_head = loud_kv_head;
  return {geometry, {shape}, random};
}

// The last query rows of a causal span. The same K/V rows are visible to them as in the whole span.
Span LastRows(Span span) {
  const int32_t rows = std::min(span.query_rows, kCheckedRows);
  span.query += (span.query_rows - rows) * span.row_stride;
  span.query_rows = rows;
  return span;
}

std::vector<double> Oracle(const Geometry& geometry, const Span& span) {
  const Span last = LastRows(span);
  return ReferenceAttention({geometry, &last, 1}).output;
}

// Errors, each divided by the largest magnitude of its head's V.
struct RelativeErrors {
  double largest = 0;
  double mean = 0;  // root mean square
};

// Errors of `got`, the output of the last rows, against attention over the unquantised K/V.
RelativeErrors ErrorsOf(const std::vector<double>& got, Problem* problem) {
  ProblemSpan& span = problem->span(0);
  Geometry geometry = problem->geometry();
  geometry.kv_dtype = KvDType::kSameAsQuery;
  const std::vector<double> want = Oracle(geometry, span.unquantised());
  EXPECT_EQ(got.size(), want.size());
  double largest_value[kHeads];
  for (int32_t h = 0; h < kHeads; ++h) largest_value[h] = span.LargestValue(h);
  RelativeErrors errors;
  for (size_t n = 0; n < want.size(); ++n) {
    const double error = std::abs(got[n] - want[n]) / largest_value[n / geometry.head_dim % kHeads];
    errors.mean += error * error / want.size();
    errors.largest = std::max(errors.largest, std::isnan(error) ? INFINITY : error);
  }
  errors.mean = std::sqrt(errors.mean);
  return errors;
}

// Elements of K and V are uniform in [-m, m], and the scale maps m to the largest E4M3. Then E4M3
// changes an element by m / 68 (standard deviation). The softmax of such inputs is nearly flat, so
// over n tokens the error of V changes O by m / 68 / sqrt(n). The error of K changes scores by
// 1 / 68 / sqrt(3), and O by a third of that of V. Together 0.0155 * m / sqrt(n). The largest of
// 10^5 such errors is below 6 standard deviations. The root mean square is that of 500 elements or
// more, of which some are correlated: 1.3 standard deviations.
bool WithinBounds(const RelativeErrors& errors, int32_t kv_rows) {
  const double deviation = 0.0155 / std::sqrt(kv_rows - kCheckedRows);
  return errors.largest <= 6 * deviation && errors.mean <= 1.3 * deviation;
}

double CheckErrors(const std::vector<double>& got, Problem* problem) {
  const RelativeErrors errors = ErrorsOf(got, problem);
  EXPECT_TRUE(WithinBounds(errors, problem->span(0).span().kv.rows))
      << "largest " << errors.largest << ", root mean square " << errors.mean;
  return errors.largest;
}

void Report(const Geometry& geometry, const Fp8Case& fp8, bool loud, double error) {
  const std::string name = std::string(fp8.name) + "_d" + std::to_string(geometry.head_dim) +
                           (loud ? "_loud_head" : "") + "_max_error";
  testing::Test::RecordProperty(name, testing::PrintToString(error));
  std::cout << name << " " << error << std::endl;
}

TEST(Fp8Error, OfQuantisationAlone) {
  std::mt19937_64 random(TestSeed());
  for (int32_t head_dim : {64, 128}) {
    const Geometry geometry{DType::kFloat16, kHeads, kHeads, head_dim, KvDType::kFloat8E4M3};
    for (const Fp8Case& fp8 : kCases) {
      for (int32_t loud_kv_head : {-1, kLoudHead}) {
        Problem problem = MakeProblem(geometry, fp8, loud_kv_head, &random);
        const double error = CheckErrors(Oracle(geometry, problem.span(0).span()), &problem);
        EXPECT_GT(error, 1e-4);  // FP8 was measured, not 16 bits
        Report(geometry, fp8, loud_kv_head >= 0, error);
      }
    }
  }
}

// The output without the 16 K/V rows from `begin` on.
std::vector<double> Lost(const Geometry& geometry, Span span, int32_t begin) {
  std::vector<double> output;
  span = LastRows(span);
  const Rounding exact;
  const SpanResult all = ExpectedOf(geometry, span, exact).exact;
  Span lost = span;  // only these rows, without a mask: every checked query row sees them
  lost.mask = Mask::None();
  lost.kv.rows = 16;
  lost.kv.pages += begin / kPageTokens;
  const SpanResult part = ExpectedOf(geometry, lost, exact).exact;
  for (size_t n = 0; n < all.output.size(); ++n) {
    const double weight =
        std::exp(part.lse[n / geometry.head_dim] - all.lse[n / geometry.head_dim]);
    output.push_back((all.output[n] - weight * part.output[n]) / (1 - weight));
  }
  return output;
}

TEST(Fp8Error, BoundsRejectFaults) {
  std::mt19937_64 random(TestSeed());
  const Geometry geometry{DType::kFloat16, kHeads, kHeads, 64, KvDType::kFloat8E4M3};
  for (const Fp8Case& fp8 : kCases) {
    Problem problem = MakeProblem(geometry, fp8, kLoudHead, &random);
    const std::vector<double> right = Oracle(geometry, problem.span(0).span());
    EXPECT_TRUE(WithinBounds(ErrorsOf(right, &problem), fp8.kv_rows));
    const auto expect_rejected = [&](const char* fault, const std::vector<double>& wrong) {
      EXPECT_FALSE(WithinBounds(ErrorsOf(wrong, &problem), fp8.kv_rows)) << fault << fp8.name;
    };
    expect_rejected("zeros ", std::vector<double>(right.size(), 0));
    expect_rejected("16 lost rows ", Lost(geometry, problem.span(0).span(), 128));
    std::vector<double> swapped = right;
    std::swap_ranges(swapped.begin(), swapped.begin() + geometry.head_dim,
                     swapped.begin() + geometry.head_dim);
    expect_rejected("swapped heads ", swapped);
    std::vector<double> scaled = right;  // the loud head with the scale of another
    for (int32_t d = 0; d < geometry.head_dim; ++d)
      scaled[kLoudHead * geometry.head_dim + d] /= 100;
    expect_rejected("wrong V scale ", scaled);
  }
}

class AttentionFp8Test : public AttentionTest {};

TEST_P(AttentionFp8Test, ErrorAgainstUnquantisedKv) {
  const Geometry geometry = MakeGeometry(kHeads, kHeads);
  for (const Fp8Case& fp8 : kCases) {
    for (int32_t loud_kv_head : {-1, kLoudHead}) {
      Problem problem = MakeProblem(geometry, fp8, loud_kv_head, &random_);
      Run(problem.batch());
      std::vector<double> output;
      for (uint16_t element : problem.span(0).Output()) {
        output.push_back(ToFloat(geometry.dtype, element));
        ASSERT_FALSE(std::isnan(output.back()));
      }
      const int64_t checked = LastRows(problem.span(0).span()).query_rows;
      const std::vector<double> last(output.end() - checked * kHeads * geometry.head_dim,
                                     output.end());
      Report(geometry, fp8, loud_kv_head >= 0, CheckErrors(last, &problem));
    }
  }
}

// A build without CUDA has no kernel that reads FP8.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AttentionFp8Test);
INSTANTIATE_TEST_SUITE_P(Kernels, AttentionFp8Test,
                         testing::ValuesIn(KernelsWhere([](const KernelSpec& spec) {
                           return spec.kv_dtype == KvDType::kFloat8E4M3;
                         })),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace flashcore::kernels
