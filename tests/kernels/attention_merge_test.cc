// The contract of (O, LSE): attention over parts of a span's K/V, merged by LSE, is attention over
// all of it. With O_k and LSE_k of part k, relative to LSE = log sum_k exp(LSE_k):
//
//   O = sum_k exp(LSE_k - LSE) O_k
//
// A part that a query row does not see has LSE -infinity, and adds nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hwy/targets.h"
#include "kernels/half.h"
#include "kernels/oracle/error_bound.h"
#include "tests/kernels/attention_fixture.h"
#include "tests/kernels/problem.h"

namespace flashcore::kernels {
namespace {

struct MergeCase {
  SpanShape shape;
  std::vector<int32_t> cuts;  // K/V rows where a part ends, ascending; paged: whole pages
};

const std::vector<MergeCase> kCases = {
    {{1, 1700, Mask::None(), Layout::kPaged}, {640, 640, 1024}},  // an empty part
    {{1, 1300, Mask::Causal(), Layout::kDenseNhd}, {1, 513, 1299}},
    // The first 3 of 5 query rows see nothing of the last part, 2 K/V rows.
    {{5, 700, Mask::Causal(), Layout::kDenseNhd}, {350, 698}},
    {{40, 300, Mask::Causal(), Layout::kDenseHnd}, {130, 290}},
    // Outside of the window is the first part, which becomes empty.
    {{4, 900, Mask::SlidingWindow(600, 0), Layout::kDenseNhd}, {290, 500}},
    {{30, 400, Mask::SlidingWindow(200, 3), Layout::kPaged}, {128, 256, 320}},
    {{3, 64, Mask::None(), Layout::kPaged}, {0, 64}},
    {{2, 0, Mask::None(), Layout::kPaged}, {0}},  // nothing at all
};

// A span over the K/V rows [begin, end) of another, with O and LSE of its own.
class Part {
 public:
  Part(const Geometry& geometry, const Span& whole, KvRange kv_rows)
      : geometry_(geometry),
        output_(whole.query_rows * whole.row_stride / 2, 0x7fff),
        lse_(geometry.num_heads * whole.lse_head_stride, std::nanf("")),
        span_(whole) {
    span_.output = reinterpret_cast<std::byte*>(output_.data());
    span_.lse = lse_.data();
    KvView& kv = span_.kv;
    const int32_t after = whole.kv.rows - kv_rows.end;
    // A part before the window of every row: the client leaves it out.
    if (whole.terms.mask.left != Mask::kUnbounded && after > whole.terms.mask.left) {
      EXPECT_LE(kv_rows.end, VisibleKv(whole.terms.mask, whole.query_rows, kv.rows, 0, 1).begin);
      kv_rows.begin = kv_rows.end;
    }
    kv.rows = kv_rows.end - kv_rows.begin;
    if (kv.rows == 0) return;
    if (kv.pages != nullptr) {
      EXPECT_EQ(kv_rows.begin % kPageTokens, 0);
      kv.pages += kv_rows.begin / kPageTokens;
    } else {
      kv.key += kv_rows.begin * kv.row_stride;
      kv.value += kv_rows.begin * kv.row_stride;
    }
    // The last query row is aligned with the last K/V row of the whole span.
    if (span_.terms.mask.left != Mask::kUnbounded) span_.terms.mask.left -= after;
    if (span_.terms.mask.right != Mask::kUnbounded) span_.terms.mask.right += after;
  }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  const Span& span() const { return span_; }

  AttentionResult Result() const {
    AttentionResult result;
    for (int32_t i = 0; i < span_.query_rows; ++i) {
      for (int32_t h = 0; h < geometry_.num_heads; ++h) {
        const uint16_t* from = output_.data() + (i * span_.row_stride + h * span_.head_stride) / 2;
        for (int32_t d = 0; d < geometry_.head_dim; ++d) {
          result.output.push_back(ToFloat(geometry_.dtype, from[d]));
        }
        result.lse.push_back(lse_[i * span_.lse_row_stride + h * span_.lse_head_stride]);
      }
    }
    return result;
  }

 private:
  const Geometry geometry_;
  std::vector<uint16_t> output_;
  std::vector<float> lse_;
  Span span_;
};

// Weights of the parts of a row, exp(LSE_k - LSE), and the LSE.
std::pair<std::vector<double>, double> MergeWeights(const std::vector<AttentionResult>& parts,
                                                    size_t row, double lse_factor) {
  double max = -INFINITY, sum = 0;
  for (const AttentionResult& part : parts) max = std::max(max, part.lse[row] * lse_factor);
  std::vector<double> weights(parts.size(), 0);
  if (std::isinf(max)) return {weights, max};
  for (size_t k = 0; k < parts.size(); ++k) {
    sum += weights[k] = std::exp(parts[k].lse[row] * lse_factor - max);
  }
  for (double& weight : weights) weight /= sum;
  return {weights, max + std::log(sum)};
}

// `lse_factor`: 1, or another for a client that takes the LSE for another logarithm.
AttentionResult Merge(const std::vector<AttentionResult>& parts, double lse_factor = 1) {
  AttentionResult merged;
  const size_t rows = parts[0].lse.size(), head_dim = parts[0].output.size() / rows;
  merged.output.resize(parts[0].output.size(), 0);
  for (size_t row = 0; row < rows; ++row) {
    const auto [weights, lse] = MergeWeights(parts, row, lse_factor);
    merged.lse.push_back(lse);
    for (size_t k = 0; k < parts.size(); ++k) {
      for (size_t n = row * head_dim; n < (row + 1) * head_dim; ++n) {
        merged.output[n] += weights[k] * parts[k].output[n];
      }
    }
  }
  return merged;
}

// The bounds of a merged result. Part k adds its own errors times its weight, and the error of its
// weight, which is that of LSE_k, times O_k - O.
Expected MergedBounds(const std::vector<Expected>& parts) {
  std::vector<AttentionResult> exact;
  for (const Expected& part : parts) exact.push_back(part.exact);
  Expected merged;
  merged.exact = Merge(exact);
  const size_t rows = merged.exact.lse.size(), head_dim = merged.exact.output.size() / rows;
  merged.element_bound.resize(merged.exact.output.size(), 0);
  merged.row_bound.resize(rows, 0);
  merged.lse_bound.resize(rows, 0);
  for (size_t row = 0; row < rows; ++row) {
    const std::vector<double> weights = MergeWeights(exact, row, 1).first;
    for (size_t k = 0; k < parts.size(); ++k) {
      const double lse_bound = parts[k].lse_bound[row];
      double squares = 0;
      for (size_t n = row * head_dim; n < (row + 1) * head_dim; ++n) {
        const double change = lse_bound * (exact[k].output[n] - merged.exact.output[n]);
        squares += change * change;
        merged.element_bound[n] += weights[k] * (parts[k].element_bound[n] + std::abs(change));
      }
      merged.row_bound[row] +=
          weights[k] * (parts[k].row_bound[row] + std::sqrt(squares / head_dim));
      merged.lse_bound[row] += weights[k] * lse_bound;
    }
  }
  return merged;
}

// The bounds of the difference between two results that have these bounds.
Expected Sum(const Expected& a, Expected b) {
  const auto add = [](const std::vector<double>& from, std::vector<double>* to) {
    for (size_t n = 0; n < from.size(); ++n) (*to)[n] += from[n];
  };
  add(a.element_bound, &b.element_bound);
  add(a.row_bound, &b.row_bound);
  add(a.lse_bound, &b.lse_bound);
  return b;
}

void ExpectWithin(const AttentionResult& got, const AttentionResult& want, const Expected& bounds) {
  const ErrorRatios ratios = CompareResults(got, want, bounds);
  EXPECT_LE(ratios.element, 1);
  EXPECT_LE(ratios.row, 1);
  EXPECT_LE(ratios.lse, 1);
}

class AttentionMergeTest : public AttentionTest {
 protected:
  // Attends the whole span and its parts in one launch.
  void CheckMerge(const Geometry& geometry, const MergeCase& merge);
};

void AttentionMergeTest::CheckMerge(const Geometry& geometry, const MergeCase& merge) {
  Problem problem(geometry, {merge.shape}, &random_);
  const Span& span = problem.span(0).span();
  std::vector<std::unique_ptr<Part>> parts;
  parts.push_back(std::make_unique<Part>(geometry, span, KvRange{0, span.kv.rows}));
  int32_t begin = 0;
  std::vector<int32_t> ends = merge.cuts;
  if (span.kv.pages != nullptr) {  // cuts are between pages; 8-bit K/V is always paged
    for (int32_t& end : ends) end -= end % kPageTokens;
  }
  ends.push_back(span.kv.rows);
  for (int32_t end : ends) {
    parts.push_back(std::make_unique<Part>(geometry, span, KvRange{begin, end}));
    begin = end;
  }
  std::vector<Span> spans;
  std::vector<Expected> expected;
  for (const auto& part : parts) {
    spans.push_back(part->span());
    const Rounding rounding = KernelRounding(geometry, part->span());
    expected.push_back(ExpectedOf(geometry, part->span(), rounding));
  }
  const Expected whole = expected[0];
  expected.erase(expected.begin());
  const Expected merged_bounds = MergedBounds(expected);
  for (int64_t target : Targets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    const ScopedTarget scoped(target);
    Run({geometry, spans.data(), static_cast<int32_t>(spans.size())});
    std::vector<AttentionResult> results;
    for (size_t k = 1; k < parts.size(); ++k) results.push_back(parts[k]->Result());
    const AttentionResult merged = Merge(results);
    ExpectWithin(merged, whole.exact, merged_bounds);
    ExpectWithin(merged, parts[0]->Result(), Sum(whole, merged_bounds));
    if (span.kv.rows >= 300) {  // in parts of different lengths
      EXPECT_FALSE(CompareResults(Merge(results, 1.44), whole.exact, merged_bounds).Ok());
    }
  }
}

TEST_P(AttentionMergeTest, PartsMergedByLseAreOneCall) {
  for (const MergeCase& merge : kCases) {
    SCOPED_TRACE(std::to_string(merge.shape.query_rows) + " query rows over " +
                 std::to_string(merge.shape.kv_rows));
    CheckMerge(MakeGeometry(4, 2), merge);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttentionMergeTest, testing::ValuesIn(AllKernels()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace flashcore::kernels
