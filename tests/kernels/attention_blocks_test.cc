// CUDA kernels attend a span with other blocks as the batch and the device ask for: in splits or in
// runs, with larger or smaller tiles, with more or less shared memory. The bits are always the
// same.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "tests/kernels/attention_fixture.h"
#include "tests/kernels/launch.h"
#include "tests/kernels/problem.h"

namespace flashcore::kernels {
namespace {

bool HasRuns(const Plan& plan) {
  return std::any_of(plan.items.begin(), plan.items.end(),
                     [](const WorkItem& item) { return item.IsRun(); });
}

class AttentionBlocksTest : public AttentionTest {
 protected:
  Plan Run(const AttentionBatch& batch, int32_t workers, const Kernel& kernel = GetParam()) {
    Plan plan;
    MakePlan(batch, kernel.plan_options, workers, &plan);
    EXPECT_EQ(Launch(kernel, batch, plan, nullptr), 0);
    return plan;
  }

  // O and LSE of all spans; poisons them for the next run.
  static Problem::Outputs Take(Problem* problem) {
    for (int s = 0; s < problem->num_spans(); ++s) {
      EXPECT_TRUE(problem->span(s).PaddingIsUntouched());
    }
    Problem::Outputs outputs = problem->outputs();
    problem->PoisonOutputs();
    return outputs;
  }

  static void ExpectSameBits(const Problem::Outputs& a, const Problem::Outputs& b) {
    for (size_t s = 0; s < a.lse.size(); ++s) {
      EXPECT_TRUE(a.output[s] == b.output[s]) << "O of span " << s;
      EXPECT_TRUE(a.lse[s] == b.lse[s]) << "LSE of span " << s;
    }
  }

  // Checks a batch of these spans, planned for so many workers.
  void CheckRuns(const std::vector<SpanShape>& shapes, int32_t workers, bool has_runs) {
    Problem problem(MakeGeometry(4, 2), shapes, &random_);
    EXPECT_EQ(HasRuns(Run(problem.batch(), workers)), has_runs);
    const Problem::Outputs together = Take(&problem);
    for (int s = 0; s < problem.num_spans(); ++s) {
      EXPECT_FALSE(HasRuns(Run(problem.batch_of(s), workers)));
    }
    ExpectSameBits(together, Take(&problem));
  }
};

// Spans of 9 splits: a run of 8, and another of one, which are combined.
TEST_P(AttentionBlocksTest, SeveralRuns) {
  std::vector<SpanShape> shapes(10, {60, 9000, Mask::Causal()});
  shapes[1] = {62, 9100, Mask::None(), Layout::kDenseNhd};
  shapes[2] = {57, 12000, Mask::SlidingWindow(8800, 2)};
  shapes[3] = {63, 9000, Mask::None(), Layout::kDenseHnd};
  shapes[4] = {64, 9210, Mask::Causal()};
  shapes[5] = {1, 3000};
  shapes[6] = {33, 700};
  CheckRuns(shapes, 9 * 128 / GetParam().plan_options.tile_rows, GetParam().plan_options.has_runs);
}

// Several tiles, whose splits are one run each: it writes O and LSE itself.
TEST_P(AttentionBlocksTest, SingleRuns) {
  CheckRuns({{130, 9000, Mask::Causal()},
             {130, 8000, Mask::None(), Layout::kDenseNhd},
             {12, 9000, Mask::SlidingWindow(7000, 2)},
             {30, 9000, Mask::Causal(), Layout::kDenseHnd},
             {130, 9000, Mask::Causal()},
             {20, 5000, Mask::Causal()},
             {130, 8500, Mask::Causal()}},
            8, GetParam().plan_options.has_runs);
}

// Small spans of one split, and of up to 7 runs, the last of 1 to 4 splits. Splits are of 256 K/V
// rows (512 up to 64 components a head), and longer in the last two spans.
TEST_P(AttentionBlocksTest, RunsOfSmallSpans) {
  CheckRuns({{1, 3000},
             {1, 4100, Mask::None(), Layout::kDenseHnd},
             {8, 2049, Mask::Causal()},
             {3, 4001, Mask::None(), Layout::kDenseNhd},
             {4, 3000, Mask::SlidingWindow(2200, 1)},
             {5, 1500, Mask{Mask::kUnbounded, 2}},
             {7, 2600, Mask::Causal()},
             {1, 200},
             {2, 1030, Mask::SlidingWindow(1000, 0)},
             {6, 3333, Mask::Causal()},
             {2, 2048},
             {1, 3590, Mask::Causal()},
             {8, 1200},
             {1, 7000},
             {4, 6144, Mask::Causal()}},
            8, GetParam().plan_options.has_small_runs);
}

// Up to 8 packed rows, which have a kernel of their own over 8-bit K/V: the bits of the kernel for
// 16, which a batch with one span of more rows gets.
TEST_P(AttentionBlocksTest, RunsOfTheSmallestSpans) {
  std::vector<SpanShape> shapes = {{1, 3000},
                                   {4, 2049, Mask::Causal()},
                                   {3, 4001, Mask::None(), Layout::kDenseNhd},
                                   {2, 3000, Mask::SlidingWindow(2200, 1)},
                                   {1, 0},
                                   {1, 4100, Mask::None(), Layout::kDenseHnd},
                                   {4, 1500, Mask{Mask::kUnbounded, 2}},
                                   {3, 77, Mask::Causal()},
                                   {1, 7000},
                                   {4, 6144, Mask::Causal()}};
  const bool has_runs = GetParam().plan_options.has_small_runs;
  CheckRuns(shapes, 4, has_runs);
  shapes.push_back({5, 2500, Mask::Causal()});
  CheckRuns(shapes, 4, has_runs);
}

// Unsplit, because a split would have more K/V rows.
const std::vector<SpanShape> kUnsplitShapes = {
    {150, 300, Mask::Causal()}, {64, 65, Mask::None(), Layout::kDenseNhd},
    {200, 64, Mask::None()},    {100, 900, Mask::SlidingWindow(130, 1)},
    {70, 500, Mask::Causal()},  {33, 129, Mask::None(), Layout::kDenseHnd},
    {300, 200, Mask::Causal()}, {40, 0, Mask::None()},
    {128, 1, Mask::None()},     {90, 640, Mask::SlidingWindow(64, 0), Layout::kDenseNhd}};

TEST_P(AttentionBlocksTest, TilesOfAnySize) {
  Problem problem(MakeGeometry(4, 2), kUnsplitShapes, &random_);
  std::set<int32_t> tile_rows;
  Problem::Outputs first;
  for (int32_t workers : {1, 45, 10000}) {
    const Plan plan = Run(problem.batch(), workers);
    EXPECT_TRUE(plan.combines.empty());
    for (const WorkItem& item : plan.items) tile_rows.insert(item.tile_rows);
    const Problem::Outputs outputs = Take(&problem);
    if (first.lse.empty()) first = outputs;
    SCOPED_TRACE(std::to_string(workers) + " workers");
    ExpectSameBits(outputs, first);
  }
  const PlanOptions& options = GetParam().plan_options;
  EXPECT_EQ(*tile_rows.begin(), options.least_tile_rows());
  EXPECT_EQ(*tile_rows.rbegin(), options.tile_rows);
}

// Spans of several splits, which alone have smaller tiles than in a batch. With a window, a span
// keeps its tiles.
TEST_P(AttentionBlocksTest, SplitsInTilesOfAnySize) {
  Problem problem(MakeGeometry(4, 2),
                  {{100, 4200, Mask::Causal()},
                   {90, 4097, Mask::None(), Layout::kDenseNhd},
                   {101, 4200, Mask::SlidingWindow(4000, 1)},
                   {60, 4160, Mask::Causal(), Layout::kDenseHnd},
                   {128, 4127, Mask::Causal()},
                   {33, 4100, Mask::None()},
                   {20, 4200, Mask::Causal()},
                   {95, 4200, Mask{Mask::kUnbounded, 3}}},
                  &random_);
  std::set<int32_t> tile_rows;
  const auto run = [&](const AttentionBatch& batch, int32_t workers) {
    for (const WorkItem& item : Run(batch, workers).items) {
      if (item.combine >= 0) tile_rows.insert(item.tile_rows);
    }
  };
  for (int32_t workers : {11, 33, 60}) {
    run(problem.batch(), workers);
    const Problem::Outputs together = Take(&problem);
    for (int s = 0; s < problem.num_spans(); ++s) run(problem.batch_of(s), workers);
    SCOPED_TRACE(std::to_string(workers) + " workers");
    ExpectSameBits(together, Take(&problem));
  }
  EXPECT_EQ(*tile_rows.begin(), GetParam().plan_options.least_tile_rows());
  EXPECT_EQ(*tile_rows.rbegin(), GetParam().plan_options.tile_rows);
}

// Tiles of every size run side by side.
TEST_P(AttentionBlocksTest, TilesOfAllSizes) {
  std::vector<SpanShape> shapes = kUnsplitShapes;
  for (int i = 0; i < 6; ++i) {
    shapes.push_back({1 + i, 700, Mask::Causal()});
    shapes.push_back({12 + i, 400, Mask::None(), Layout::kDenseHnd});
    shapes.push_back({25 + i, 500, Mask::Causal()});
  }
  Problem problem(MakeGeometry(4, 2), shapes, &random_);
  const PlanCosts& costs = *GetParam().plan_options.costs;
  std::set<int32_t> tile_rows;
  for (const WorkItem& item : Run(problem.batch(), 1).items) {
    tile_rows.insert(costs.tiles[costs.KindOf(item.tile_rows)].rows);
  }
  EXPECT_EQ(*tile_rows.begin(), kSmallSpanRows);
  EXPECT_EQ(*tile_rows.rbegin(), GetParam().plan_options.tile_rows);
  EXPECT_GE(tile_rows.size(), 3u);
  const Problem::Outputs together = Take(&problem);
  for (int s = 0; s < problem.num_spans(); ++s) Run(problem.batch_of(s), 1);
  ExpectSameBits(together, Take(&problem));
}

// The kernels for devices with little shared memory give the bits of the others. Their splits may
// differ.
TEST_P(AttentionBlocksTest, LittleSharedMemory) {
  KernelSpec small = GetParam().spec;
  small.arch = Arch::kSmallShared;
  const Kernel& kernel = *FindKernel(small);
  Problem problem(MakeGeometry(4, 2), kUnsplitShapes, &random_);
  for (int32_t workers : {1, 45, 10000}) {
    Run(problem.batch(), workers);
    const Problem::Outputs large = Take(&problem);
    Run(problem.batch(), workers, kernel);
    ExpectSameBits(large, Take(&problem));
  }
}

// A build without CUDA has none.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AttentionBlocksTest);
INSTANTIATE_TEST_SUITE_P(Kernels, AttentionBlocksTest,
                         testing::ValuesIn(KernelsWhere([](const KernelSpec& spec) {
                           return spec.arch != Arch::kCpu;
                         })),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace flashcore::kernels
