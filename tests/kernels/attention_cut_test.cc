// Batches that are cut into several launches: the bits are those of one launch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "hwy/targets.h"
#include "kernels/plan_cut.h"
#include "tests/kernels/attention_fixture.h"
#include "tests/kernels/problem.h"

namespace flashcore::kernels {
namespace {

class AttentionCutTest : public AttentionTest {
 protected:
  int32_t Below(int32_t n) { return static_cast<int32_t>(random_() % n); }

  std::vector<SpanShape> RandomShapes() {
    const Mask masks[] = {Mask::None(), Mask::Causal(), Mask::SlidingWindow(70 + Below(700), 0),
                          Mask{Below(300), Below(300)}};
    const Layout layouts[] = {Layout::kDenseNhd, Layout::kDenseHnd, Layout::kPaged};
    std::vector<SpanShape> shapes;
    for (int s = 1 + Below(4); s > 0; --s) {
      SpanShape shape;
      shape.query_rows = Below(2) == 0 ? 1 + Below(6) : 1 + Below(400);
      shape.kv_rows = Below(4) == 0 ? Below(3) : Below(1500);  // beyond two splits
      shape.mask = masks[Below(4)];
      shape.layout = layouts[Below(3)];
      shapes.push_back(shape);
    }
    return shapes;
  }

  // Runs one part on poisoned outputs. Moves what it wrote to `*all`, where nothing may be yet.
  void RunPart(const BatchPart& part, Problem* problem, Problem::Outputs* all) {
    problem->PoisonOutputs();
    const AttentionBatch whole = problem->batch();
    std::vector<Span> spans(whole.spans, whole.spans + whole.num_spans);
    for (int32_t s = 0; s < whole.num_spans; ++s) spans[s].slices = part.SlicesOf(s);
    Run({whole.geometry, spans.data(), whole.num_spans}, 1 + Below(2));
    const Problem::Outputs outputs = problem->outputs();
    const size_t head_dim = static_cast<size_t>(whole.geometry.head_dim);
    for (size_t s = 0; s < outputs.lse.size(); ++s) {
      EXPECT_TRUE(problem->span(static_cast<int>(s)).PaddingIsUntouched());
      for (size_t i = 0; i < outputs.lse[s].size(); ++i) {
        if (std::isnan(outputs.lse[s][i])) continue;
        EXPECT_TRUE(std::isnan(all->lse[s][i])) << "written twice: " << i;
        all->lse[s][i] = outputs.lse[s][i];
        std::copy_n(&outputs.output[s][i * head_dim], head_dim, &all->output[s][i * head_dim]);
      }
    }
  }
};

TEST_P(AttentionCutTest, PartsHaveTheBitsOfOneLaunch) {
  const PlanOptions& options = GetParam().plan_options;
  size_t most = 0;
  for (int trial = 0; trial < 12; ++trial) {
    const int32_t kv_heads = 1 + Below(3);
    Problem problem(MakeGeometry(kv_heads * (1 + Below(4)), kv_heads), RandomShapes(), &random_);
    const std::vector<int64_t> targets = Targets();
    const ScopedTarget scoped(targets[trial % targets.size()]);
    Run(problem.batch());
    const Problem::Outputs want = problem.outputs();
    problem.PoisonOutputs();
    Problem::Outputs got = problem.outputs();
    const double flop = std::pow(10, 4 + Below(4));
    std::vector<BatchPart> parts = CutBatch(problem.batch(), options, 1, {flop, 1});
    most = std::max(most, parts.size());
    std::shuffle(parts.begin(), parts.end(), random_);
    for (const BatchPart& part : parts) RunPart(part, &problem, &got);
    EXPECT_EQ(got.output, want.output);
    EXPECT_EQ(got.lse, want.lse);
    if (HasFailure()) return;
  }
  EXPECT_GT(most, 3u);
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttentionCutTest, testing::ValuesIn(AllKernels()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace flashcore::kernels
