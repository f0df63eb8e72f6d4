// Every kernel of the registry against the float64 oracle. Parametrised over AllKernels(), so a new
// row of the registry is tested without a change here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "hwy/targets.h"
#include "kernels/cpu/attention_cpu.h"
#include "kernels/half.h"
#include "tests/kernels/attention_fixture.h"
#include "tests/kernels/families.h"
#include "tests/kernels/problem.h"

namespace flashcore::kernels {
namespace {

constexpr Layout kLayouts[] = {Layout::kDenseNhd, Layout::kDenseHnd, Layout::kPaged};

TEST_P(AttentionTest, EveryLengthWithEveryMaskAndLayout) {
  CheckFamilies("EveryLengthWithEveryMaskAndLayout");
}

TEST_P(AttentionTest, ManyTiles) { CheckFamilies("ManyTiles"); }

TEST_P(AttentionTest, ManyRows) { CheckFamilies("ManyRows"); }

TEST_P(AttentionTest, DecodeSplitsOverManyTiles) { CheckFamilies("DecodeSplitsOverManyTiles"); }

TEST_P(AttentionTest, DecodeOfManyPartialResults) { CheckFamilies("DecodeOfManyPartialResults"); }

TEST_P(AttentionTest, ManyRowsOnLongKv) { CheckFamilies("ManyRowsOnLongKv"); }

TEST_P(AttentionTest, GroupedQueryHeads) { CheckFamilies("GroupedQueryHeads"); }

TEST_P(AttentionTest, LargeMagnitudes) { CheckFamilies("LargeMagnitudes"); }

TEST_P(AttentionTest, ScalesOfEitherSignAndZero) { CheckFamilies("ScalesOfEitherSignAndZero"); }

TEST_P(AttentionTest, RowsWithoutVisibleKv) {
  const Family family = FamiliesNamed("RowsWithoutVisibleKv").at(0);
  FamilyProblem rows(family, MakeGeometry(family.heads, family.kv_heads), &random_);
  Problem& problem = *rows.get();
  Check(&problem);
  const std::vector<uint16_t> output = problem.span(0).Output();
  const std::vector<float> lse = problem.span(0).Lse();
  for (int32_t n = 0; n < 130 * 2; ++n) {
    EXPECT_EQ(lse[n], -INFINITY);
    for (int32_t d = 0; d < problem.geometry().head_dim; ++d) {
      EXPECT_EQ(output[n * problem.geometry().head_dim + d], 0);
    }
  }
}

TEST_P(AttentionTest, MoreThan32768Rows) { CheckFamilies("MoreThan32768Rows"); }

TEST_P(AttentionTest, LseIsOptional) {
  Problem problem(MakeGeometry(2, 1), {{20, 130}, {1, 600}}, &random_);
  Run(problem.batch());
  const std::vector<uint16_t> with[] = {problem.span(0).Output(), problem.span(1).Output()};
  for (int s = 0; s < 2; ++s) {
    problem.span(s).PoisonOutputs();
    problem.span(s).mutable_span().lse = nullptr;
  }
  Run(problem.batch());
  for (int s = 0; s < 2; ++s) {
    EXPECT_EQ(problem.span(s).Output(), with[s]);
    for (float lse : problem.span(s).Lse()) EXPECT_TRUE(std::isnan(lse));
  }
}

// Decode and prefill spans in every layout. Tokens 0 to 174 of span 1 are masked for all its rows.
Problem MixedSpans(const Geometry& geometry, std::mt19937_64* random) {
  return {geometry,
          {{1, 130, Mask::Causal()},
           {5, 200, Mask::SlidingWindow(20, 0)},
           {100, 100, Mask::Causal(), Layout::kDenseNhd},
           {70, 150, Mask::SlidingWindow(40, 3), Layout::kDenseHnd},
           {1, 1300, Mask::None()}},
          random};
}

// A NaN or infinity in a K or V row reaches every query row that attends to it: at the first and
// last token of a tile, in its middle, and at the last row. In a query row it reaches that row
// only.
TEST_P(AttentionTest, NonFiniteInputsReachTheRowsThatAttendToThem) {
  if (SumsInFloat16()) GTEST_SKIP() << "sums in float16 overflow to infinity";
  constexpr int32_t kKvRows = 130, kHeads = 2;
  const Geometry geometry = MakeGeometry(kHeads, 1);
  const uint16_t nan = FromFloat(geometry.dtype, std::nanf(""));
  const bool whole_row = Is8Bit(geometry.kv_dtype);  // is NaN if an element is
  for (int32_t query_rows : {kKvRows, 70, 5}) {
    Problem problem(geometry, {{query_rows, kKvRows, Mask::Causal()}}, &random_);
    ProblemSpan& span = problem.span(0);
    for (int64_t target : Targets()) {
      SCOPED_TRACE(hwy::TargetName(target));
      const ScopedTarget scoped(target);
      // Elements d of the outputs of query row i, of both heads.
      const auto expect = [&](int32_t i, int32_t d, bool is_bad) {
        const std::vector<uint16_t> output = span.Output();
        for (int32_t h = 0; h < kHeads; ++h) {
          const float o = ToFloat(geometry.dtype, output[(i * kHeads + h) * geometry.head_dim + d]);
          EXPECT_EQ(!std::isfinite(o), is_bad) << "row " << i << ", head " << h << ", d " << d;
        }
      };
      for (int32_t bad : {63, 64, 71, 127, 128, kKvRows - 1}) {
        SCOPED_TRACE("K/V row " + std::to_string(bad));
        const int32_t first = std::max(0, bad - (kKvRows - query_rows));  // that attends to it
        span.SetKey(bad, 0, 0, NAN);
        Run(problem.batch());
        for (int32_t i = 0; i < query_rows; ++i) expect(i, 0, i >= first);
        span.SetKey(bad, 0, 0, 0);
        // Rows that mask a V row may get its NaN.
        span.SetValue(bad, 0, 3, NAN);
        span.SetValue(bad, 0, 4, INFINITY);
        Run(problem.batch());
        for (int32_t i = first; i < query_rows; ++i) {
          expect(i, 3, true);
          expect(i, 4, true);
          expect(i, 0, whole_row);
        }
        span.SetValue(bad, 0, 3, 0);
        span.SetValue(bad, 0, 4, 0);
      }
      const int32_t bad_query = query_rows / 2;
      const uint16_t query = span.QueryRow(bad_query, 1)[7];
      span.QueryRow(bad_query, 1)[7] = nan;
      Run(problem.batch());
      span.QueryRow(bad_query, 1)[7] = query;
      const std::vector<uint16_t> output = span.Output();
      for (int32_t n = 0; n < query_rows * kHeads; ++n) {
        const float o = ToFloat(geometry.dtype, output[n * geometry.head_dim]);
        EXPECT_EQ(std::isnan(o), n == bad_query * kHeads + 1) << n;
      }
    }
  }
}

// There are 128 query rows over 100 K/V rows: 28 see nothing at all, and 64 others nothing of the
// second of two splits, in which V has a NaN.
TEST_P(AttentionTest, ASplitInWhichARowSeesNothingContributesNothing) {
  if (GetParam().spec.arch != Arch::kCpu) GTEST_SKIP() << "has splits of few rows only";
  constexpr int32_t kQueryRows = 128, kKvRows = 100, kEmptyRows = kQueryRows - kKvRows;
  PlanOptions options = GetParam().plan_options;
  options.split_kv_rows = kPageTokens;
  options.split_max_rows = kQueryRows;
  options.cascade_rows = 0;
  Problem problem(MakeGeometry(1, 1), {{kQueryRows, kKvRows, Mask::Causal()}}, &random_);
  ProblemSpan& span = problem.span(0);
  const size_t head_dim = GetParam().spec.head_dim;
  for (const int64_t target : Targets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    const ScopedTarget scoped(target);
    for (const float value : {0.0f, NAN}) {
      span.SetValue(kKvRows - 1, 0, 0, value);
      problem.PoisonOutputs();
      Run(problem.batch(), 2, options);
      const std::vector<uint16_t> output = span.Output();
      const std::vector<float> lse = span.Lse();
      for (int32_t i = 0; i < kEmptyRows + kPageTokens; ++i) {
        const bool empty = i < kEmptyRows;
        EXPECT_EQ(lse[i] == -INFINITY, empty) << i;
        const float o = ToFloat(GetParam().spec.dtype, output[i * head_dim]);
        EXPECT_TRUE(empty ? o == 0 : std::isfinite(o)) << i << ": " << o;
      }
    }
  }
}

// NaN and infinity at tokens that rows of a span mask, and at tokens that they attend to, leave
// every other span of the batch untouched, bit for bit.
TEST_P(AttentionTest, NonFiniteInputsStayWithTheirSpan) {
  const Geometry geometry = MakeGeometry(4, 2);
  const std::mt19937_64 state = random_;
  Problem problem = MixedSpans(geometry, &random_);
  for (int64_t target : Targets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    const ScopedTarget scoped(target);
    Run(problem.batch());
    std::vector<std::vector<uint16_t>> output;
    std::vector<std::vector<float>> lse;
    for (int s = 0; s < problem.num_spans(); ++s) {
      output.push_back(problem.span(s).Output());
      lse.push_back(problem.span(s).Lse());
    }
    for (int bad = 0; bad < problem.num_spans(); ++bad) {
      std::mt19937_64 same_random = state;
      Problem changed = MixedSpans(geometry, &same_random);
      const int32_t rows = changed.span(bad).span().kv.rows;
      for (int32_t token : {0, 63, 64, rows - 1}) {
        for (int32_t head = 0; head < 2; ++head) {
          changed.span(bad).SetValue(token, head, 1, NAN);
          changed.span(bad).SetValue(token, head, 2, INFINITY);
        }
      }
      changed.span(bad).SetKey(63, 0, 0, NAN);
      changed.span(bad).QueryRow(0, 3)[0] = FromFloat(geometry.dtype, std::nanf(""));
      for (int threads : {1, 3}) {
        changed.PoisonOutputs();
        Run(changed.batch(), threads);
        EXPECT_NE(changed.span(bad).Output(), output[bad]);
        for (int s = 0; s < changed.num_spans(); ++s) {
          if (s == bad) continue;
          EXPECT_EQ(changed.span(s).Output(), output[s]) << "span " << s << ", bad " << bad;
          EXPECT_EQ(changed.span(s).Lse(), lse[s]) << "span " << s << ", bad " << bad;
        }
      }
    }
  }
}

// K/V memory at or beyond a span's length touches no bit: the next token of the tile (63 or 64
// among others), the last row of the tile, the next page, unused pages.
TEST_P(AttentionTest, WhatLiesBeyondTheLengthTouchesNothing) {
  std::vector<SpanShape> shapes;
  int turn = 0;
  for (int32_t kv_rows : {0, 1, 62, 63, 64, 65, 127, 128, 129, 1023}) {
    for (int32_t query_rows : {1, 3, 40}) {
      for (const Mask& mask : {Mask::None(), Mask::Causal(), Mask{30, Mask::kUnbounded}}) {
        shapes.push_back({query_rows, kv_rows, mask, kLayouts[turn++ % 3]});
      }
    }
  }
  Problem problem(MakeGeometry(2, 1), shapes, &random_);
  for (int64_t target : Targets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    const ScopedTarget scoped(target);
    std::vector<std::vector<uint16_t>> output;
    std::vector<std::vector<float>> lse;
    for (float beyond : {0.0f, std::nanf(""), INFINITY, -INFINITY, 1e4f}) {
      for (int s = 0; s < problem.num_spans(); ++s) {
        problem.span(s).FillBeyondEnd(beyond);
        problem.span(s).PoisonOutputs();
      }
      Run(problem.batch());
      for (int s = 0; s < problem.num_spans(); ++s) {
        if (beyond == 0) {
          output.push_back(problem.span(s).Output());
          lse.push_back(problem.span(s).Lse());
        }
        EXPECT_EQ(problem.span(s).Output(), output[s]) << "span " << s << ", " << beyond;
        EXPECT_EQ(problem.span(s).Lse(), lse[s]) << "span " << s << ", " << beyond;
      }
    }
  }
}

TEST_P(AttentionTest, SameBitsAgainWithMoreThreadsAndOtherSpans) {
  Problem problem(MakeGeometry(4, 2),
                  {{1, 1300, Mask::Causal()},
                   {40, 150, Mask::Causal(), Layout::kDenseNhd},
                   {2, 900, Mask::SlidingWindow(700, 0)},
                   {70, 65, Mask::None(), Layout::kDenseHnd},
                   {150, 500, Mask::SlidingWindow(100, 3)},
                   {1, 64, Mask::Causal()}},
                  &random_);
  for (int64_t target : Targets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    const ScopedTarget scoped(target);
    std::vector<std::vector<uint16_t>> first;
    std::vector<std::vector<float>> first_lse;
    Run(problem.batch(), 1);
    for (int s = 0; s < problem.num_spans(); ++s) {
      first.push_back(problem.span(s).Output());
      first_lse.push_back(problem.span(s).Lse());
    }
    const auto expect_same = [&](int s) {
      EXPECT_EQ(problem.span(s).Output(), first[s]);
      EXPECT_EQ(problem.span(s).Lse(), first_lse[s]);
      problem.span(s).PoisonOutputs();
    };
    for (int threads : {1, 3}) {
      Run(problem.batch(), threads);
      for (int s = 0; s < problem.num_spans(); ++s) expect_same(s);
    }
    for (int s = 0; s < problem.num_spans(); ++s) {
      Run(problem.batch_of(s), 3);
      expect_same(s);
    }
  }
}

// A packed row's bits depend on its own inputs only, not on the rows packed beside it.
TEST_P(AttentionTest, ARowsBitsDoNotDependOnItsNeighboursValues) {
  Problem problem(MakeGeometry(2, 1), {{70, 150, Mask::Causal()}, {3, 700, Mask::Causal()}},
                  &random_);
  Run(problem.batch());
  const std::vector<uint16_t> before[] = {problem.span(0).Output(), problem.span(1).Output()};
  const DType dtype = problem.geometry().dtype;
  const int32_t head_dim = problem.geometry().head_dim;
  const int32_t changed = 1;  // query row
  for (int s = 0; s < 2; ++s) {
    for (int32_t d = 0; d < head_dim; ++d) {  // the row's largest magnitude, too
      uint16_t& element = problem.span(s).QueryRow(changed, 0)[d];
      element = FromFloat(dtype, -4 * ToFloat(dtype, element));
    }
  }
  Run(problem.batch());
  for (int s = 0; s < 2; ++s) {
    const std::vector<uint16_t> after = problem.span(s).Output();
    for (size_t n = 0; n < after.size(); ++n) {
      if (static_cast<int32_t>(n) / head_dim != changed * 2) {
        ASSERT_EQ(after[n], before[s][n]);
      }
    }
  }
}

TEST(CpuSimdTarget, IsNamed) {
  const std::string best = hwy::TargetName(SimdTargets().front());
  EXPECT_EQ(CpuSimdTarget(), best);
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttentionTest, testing::ValuesIn(AllKernels()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace flashcore::kernels
