// Spans with a shared prefix, whose K/V a kernel may read once for all of them (cascade): the
// results are right, and their bits are those of each span alone.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "hwy/targets.h"
#include "kernels/half.h"
#include "tests/kernels/attention_fixture.h"
#include "tests/kernels/forked_kv.h"
#include "tests/kernels/problem.h"

namespace flashcore::kernels {
namespace {

constexpr int32_t kSplitPages = 8;  // of 512 K/V rows

struct ForkedSpan {
  ForkShape kv;
  int32_t query_rows = 1;
  Mask mask = Mask::Causal();
};

// A tree of forks: tails of several lengths and none, forks of forks, one span that no other can
// share with.
const std::vector<ForkedSpan> kTree = {
    {{1700}},
    {{1100, 0, 2 * kSplitPages}},
    {{1024, 1, 2 * kSplitPages}, 1, Mask::None()},
    {{1537, 0, 3 * kSplitPages}},
    {{1600, 3, 3 * kSplitPages}},
    {{512, 0, kSplitPages}},  // one split: writes its output itself
    {{513, 0, kSplitPages}},
    {{700, 0, kSplitPages - 1}},
    {{1030, 0, 2 * kSplitPages}, 1, Mask::SlidingWindow(600, 0)},
};

class ForkedProblem {
 public:
  ForkedProblem(const Geometry& geometry, const std::vector<ForkedSpan>& spans,
                std::mt19937_64* random)
      : kv_(geometry, KvShapes(spans), random), problem_(geometry, QueryShapes(spans), random) {
    for (int s = 0; s < problem_.num_spans(); ++s) {
      Span& span = problem_.span(s).mutable_span();
      span.kv = kv_.view(s);
      span.softmax_scale *= s % 3 == 2 ? -1.5f : 1 + 0.1f * s;  // to each its own
    }
  }

  Problem* operator->() { return &problem_; }
  ForkedKv* kv() { return &kv_; }
  Problem* get() { return &problem_; }

 private:
  static std::vector<ForkShape> KvShapes(const std::vector<ForkedSpan>& spans) {
    std::vector<ForkShape> shapes;
    for (const ForkedSpan& span : spans) shapes.push_back(span.kv);
    return shapes;
  }
  static std::vector<SpanShape> QueryShapes(const std::vector<ForkedSpan>& spans) {
    std::vector<SpanShape> shapes;
    for (const ForkedSpan& span : spans) shapes.push_back({span.query_rows, 0, span.mask});
    return shapes;
  }

  ForkedKv kv_;
  Problem problem_;
};

class AttentionCascadeTest : public AttentionTest {
 protected:
  PlanOptions Options(int32_t cascade_rows) const {
    PlanOptions options = GetParam().plan_options;
    options.cascade_rows = cascade_rows;
    return options;
  }

  // Runs `problem` with cascade items of several sizes, without, and span by span, on every SIMD
  // target: the bits are the same.
  void CheckBits(Problem* problem);
};

void AttentionCascadeTest::CheckBits(Problem* problem) {
  const int32_t most = GetParam().plan_options.cascade_rows;
  Plan plan;
  MakePlan(problem->batch(), Options(most), 1, &plan);
  ASSERT_EQ(plan.cascade_spans.empty(), most == 0);
  for (int64_t target : Targets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    const ScopedTarget scoped(target);
    std::vector<std::vector<uint16_t>> outputs;
    std::vector<std::vector<float>> lses;
    for (int s = 0; s < problem->num_spans(); ++s) {
      Run(problem->batch_of(s), 1, Options(0));
      outputs.push_back(problem->span(s).Output());
      lses.push_back(problem->span(s).Lse());
    }
    for (int32_t cascade_rows : {0, most / 8, most}) {
      for (int s = 0; s < problem->num_spans(); ++s) problem->span(s).PoisonOutputs();
      Run(problem->batch(), cascade_rows == most ? 1 : 3, Options(cascade_rows));
      for (int s = 0; s < problem->num_spans(); ++s) {
        EXPECT_EQ(problem->span(s).Output(), outputs[s]) << "span " << s << ", " << cascade_rows;
        EXPECT_EQ(problem->span(s).Lse(), lses[s]) << "span " << s << ", " << cascade_rows;
      }
    }
  }
}

TEST_P(AttentionCascadeTest, EveryGroupOfQueryHeads) {
  const int32_t heads[][2] = {{2, 2}, {2, 1}, {6, 2}, {4, 1}, {8, 1}, {16, 1}};
  for (const auto& [num_heads, kv_heads] : heads) {
    SCOPED_TRACE(std::to_string(num_heads) + " heads over " + std::to_string(kv_heads));
    ForkedProblem problem(MakeGeometry(num_heads, kv_heads), kTree, &random_);
    Check(problem.get());
    CheckBits(problem.get());
  }
}

TEST_P(AttentionCascadeTest, SeveralQueryRows) {
  std::vector<ForkedSpan> spans = kTree;
  for (size_t s = 0; s < spans.size(); ++s) spans[s].query_rows = 1 + static_cast<int32_t>(s) % 5;
  ForkedProblem problem(MakeGeometry(3, 1), spans, &random_);
  Check(problem.get());
  CheckBits(problem.get());
}

TEST_P(AttentionCascadeTest, MoreRowsThanAnItemHolds) {
  std::vector<ForkedSpan> spans = {{{600}}};
  for (int32_t s = 1; s < 40; ++s) spans.push_back({{513 + s, 0, kSplitPages}});
  ForkedProblem problem(MakeGeometry(4, 1), spans, &random_);
  Check(problem.get());
  CheckBits(problem.get());
}

// A non-finite element of one span does not reach the spans that it shares items with.
TEST_P(AttentionCascadeTest, ANonFiniteQueryStaysWithItsSpan) {
  ForkedProblem problem(MakeGeometry(2, 1), kTree, &random_);
  Run(problem->batch());
  std::vector<std::vector<uint16_t>> before;
  for (int s = 0; s < problem->num_spans(); ++s) before.push_back(problem->span(s).Output());
  const DType dtype = problem->geometry().dtype;
  problem->span(1).QueryRow(0, 0)[3] = FromFloat(dtype, std::nanf(""));
  problem->span(3).QueryRow(0, 1)[0] = FromFloat(dtype, INFINITY);
  Run(problem->batch());
  for (int s = 0; s < problem->num_spans(); ++s) {
    if (s == 1 || s == 3) {
      EXPECT_NE(problem->span(s).Output(), before[s]);
    } else {
      EXPECT_EQ(problem->span(s).Output(), before[s]);
    }
  }
}

TEST_P(AttentionCascadeTest, ANonFiniteValueStaysWithTheSpansOfItsPage) {
  ForkedProblem problem(MakeGeometry(2, 1), kTree, &random_);
  Run(problem->batch());
  std::vector<std::vector<uint16_t>> before;
  for (int s = 0; s < problem->num_spans(); ++s) before.push_back(problem->span(s).Output());
  // In a page of span 0 alone, and in a page that only spans 0, 3 and 4 share.
  problem.kv()->SetValue(0, 1699, 0, 3, NAN);
  problem.kv()->SetValue(3, 1535, 0, 0, INFINITY);
  problem.kv()->SetValue(3, 1535, 0, 1, NAN);
  Run(problem->batch());
  for (int s = 0; s < problem->num_spans(); ++s) {
    if (s == 0 || s == 3 || s == 4) {
      EXPECT_NE(problem->span(s).Output(), before[s]) << s;
    } else {
      EXPECT_EQ(problem->span(s).Output(), before[s]) << s;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttentionCascadeTest, testing::ValuesIn(AllKernels()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace flashcore::kernels
