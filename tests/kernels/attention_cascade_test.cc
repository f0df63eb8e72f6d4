// Spans with a shared prefix, whose K/V a kernel may read once for all of them (cascade): the
// results are right, and their bits are those of each span alone.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "hwy/targets.h"
#include "kernels/half.h"
#include "tests/kernels/attention_fixture.h"
#include "tests/kernels/families.h"
#include "tests/kernels/forked_kv.h"
#include "tests/kernels/problem.h"

namespace flashcore::kernels {
namespace {

class AttentionCascadeTest : public AttentionTest {
 protected:
  PlanOptions Options(int32_t cascade_rows) const {
    PlanOptions options = GetParam().plan_options;
    options.cascade_rows = cascade_rows;
    options.cascade_saving = 0;
    return options;
  }

  // Runs `problem` with cascade items of several sizes, without, and span by span, on every SIMD
  // target: the bits are the same.
  void CheckBits(Problem* problem);

  // Check and CheckBits on the families of one name.
  void CheckFamilies(const std::string& name);
};

void AttentionCascadeTest::CheckBits(Problem* problem) {
  const int32_t most = GetParam().plan_options.cascade_rows;
  Plan plan;
  MakePlan(problem->batch(), Options(most), WorkersOf(1), &plan);
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
      problem->PoisonOutputs();
      Run(problem->batch(), cascade_rows == most ? 1 : 3, Options(cascade_rows));
      for (int s = 0; s < problem->num_spans(); ++s) {
        EXPECT_EQ(problem->span(s).Output(), outputs[s]) << "span " << s << ", " << cascade_rows;
        EXPECT_EQ(problem->span(s).Lse(), lses[s]) << "span " << s << ", " << cascade_rows;
      }
    }
  }
}

void AttentionCascadeTest::CheckFamilies(const std::string& name) {
  const std::vector<Family> families = FamiliesNamed(name);
  ASSERT_FALSE(families.empty());
  for (const Family& family : families) {
    SCOPED_TRACE(std::to_string(family.heads) + " heads over " + std::to_string(family.kv_heads));
    FamilyProblem problem(family, MakeGeometry(family.heads, family.kv_heads), &random_);
    Check(problem.get());
    CheckBits(problem.get());
  }
}

TEST_P(AttentionCascadeTest, EveryGroupOfQueryHeads) { CheckFamilies("EveryGroupOfQueryHeads"); }

TEST_P(AttentionCascadeTest, SeveralQueryRows) { CheckFamilies("SeveralQueryRows"); }

TEST_P(AttentionCascadeTest, MoreRowsThanAnItemHolds) { CheckFamilies("MoreRowsThanAnItemHolds"); }

// Two query heads over the K/V of ForkTree().
FamilyProblem TreeProblem(const Geometry& geometry, std::mt19937_64* random) {
  for (const Family& family : FamiliesNamed("EveryGroupOfQueryHeads")) {
    if (family.heads == geometry.num_heads && family.kv_heads == geometry.num_kv_heads) {
      return {family, geometry, random};
    }
  }
  std::abort();
}

// A non-finite element of one span does not reach the spans that it shares items with.
TEST_P(AttentionCascadeTest, ANonFiniteQueryStaysWithItsSpan) {
  FamilyProblem problem = TreeProblem(MakeGeometry(2, 1), &random_);
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
  FamilyProblem problem = TreeProblem(MakeGeometry(2, 1), &random_);
  Run(problem->batch());
  std::vector<std::vector<uint16_t>> before;
  for (int s = 0; s < problem->num_spans(); ++s) before.push_back(problem->span(s).Output());
  // In a page of span 0 alone, and in a page that only spans 0, 3 and 4 share.
  problem.forked_kv()->SetValue(0, 1699, 0, 3, NAN);
  problem.forked_kv()->SetValue(3, 1535, 0, 0, INFINITY);
  problem.forked_kv()->SetValue(3, 1535, 0, 1, NAN);
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
