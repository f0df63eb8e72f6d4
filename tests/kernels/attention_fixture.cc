#include "tests/kernels/attention_fixture.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "hwy/targets.h"
#include "kernels/cpu/attention_cpu.h"
#include "kernels/half.h"
#include "kernels/oracle/errors.h"
#include "kernels/oracle/reference.h"
#include "tests/base/test_seed.h"
#include "tests/kernels/families.h"
#include "tests/kernels/launch.h"
#ifdef FLASHCORE_HAVE_CUDA
#include "tests/kernels/device_mirror.h"
#endif

namespace flashcore::kernels {
namespace {

AttentionResult ResultOf(DType dtype, const ProblemSpan& span) {
  AttentionResult result;
  for (uint16_t element : span.Output()) result.output.push_back(ToFloat(dtype, element));
  for (float lse : span.Lse()) result.lse.push_back(lse);
  return result;
}

double LargestFinite(const std::vector<double>& values) {
  double largest = 0;
  for (double value : values) {
    if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
  }
  return largest;
}

double LargestError(const std::vector<double>& got, const std::vector<double>& want) {
  double largest = 0;
  for (size_t n = 0; n < want.size(); ++n) {
    largest = std::max(largest, Difference(got[n], want[n]));
  }
  return largest;
}

// The bound that kernels/README.md states for every kernel with 16-bit products and float32 sums:
// at most twice the error of unfused attention, plus one rounding of the largest value, for results
// that unfused attention happens to hit exactly. It cannot see every fault; the bounds of
// error_bound.h can.
void ExpectTwiceUnfused(DType dtype, const AttentionResult& got, const AttentionResult& oracle,
                        const AttentionResult& unfused) {
  EXPECT_LE(LargestError(got.output, oracle.output),
            2 * LargestError(unfused.output, oracle.output) +
                UnitRoundoff(dtype) * LargestFinite(oracle.output) + 0x1p-25);
  EXPECT_LE(LargestError(got.lse, oracle.lse),
            2 * LargestError(unfused.lse, oracle.lse) + 4e-6 * (1 + LargestFinite(oracle.lse)));
}

}  // namespace

void PrintTo(const Kernel& kernel, std::ostream* out) {
  const KernelSpec& spec = kernel.spec;
  *out << Name(spec.arch) << "_" << Name(spec.dtype) << "_d" << spec.head_dim << "_"
       << Name(spec.accumulate);
  if (Is8Bit(spec.kv_dtype)) *out << "_kv_" << Name(spec.kv_dtype);
  if (spec.precision != Precision::k16Bit) *out << "_" << Name(spec.precision);
}

const std::vector<int64_t>& SimdTargets() {
  static const std::vector<int64_t> kTargets = CpuSimdTargets();
  return kTargets;
}

void ScopedTarget::Use(int64_t target) {
  hwy::SetSupportedTargetsForTest(target);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

AttentionTest::AttentionTest() : random_(TestSeed()) {}

void AttentionTest::SetUp() {
#ifdef FLASHCORE_HAVE_CUDA
  if (GetParam().spec.arch == Arch::kCpu) return;
  const std::string why = WhyNoDevice();
  if (!why.empty()) GTEST_SKIP() << why;
#endif
}

std::vector<int64_t> AttentionTest::Targets() const {
  if (GetParam().spec.arch == Arch::kCpu) return SimdTargets();
  return {SimdTargets().front()};
}

void AttentionTest::Run(const AttentionBatch& batch, int threads, const PlanOptions& options) {
  ThreadPool& pool = threads == 1 ? one_thread_ : many_threads_;
  // CUDA kernels: threads == 1 plans large tiles, otherwise small ones.
  PlanOptions plan_options = options;
  if (threads == 1) plan_options.halves_tiles = false;
  Plan plan;
  MakePlan(batch, plan_options, WorkersOf(pool.num_threads()), &plan);
  ASSERT_EQ(Launch(GetParam(), batch, plan, &pool), 0);
}

void AttentionTest::CheckSpan(const ProblemSpan& span, const SpanOracle& oracle) const {
  const DType dtype = span.geometry().dtype;
  const AttentionResult got = ResultOf(dtype, span);
  const ErrorRatios ratios = CompareResults(got, oracle.bounds.exact, oracle.bounds);
  EXPECT_LE(ratios.element, 1);
  EXPECT_LE(ratios.row, 1);
  EXPECT_LE(ratios.lse, 1);
  if (!oracle.unfused.lse.empty()) {
    ExpectTwiceUnfused(dtype, got, oracle.reference, oracle.unfused);
  }
  EXPECT_TRUE(span.PaddingIsUntouched());
}

int32_t AttentionTest::WorkersOf(int threads) const {
  return GetParam().spec.arch == Arch::kCpu ? threads : kManyWorkers;
}

Rounding AttentionTest::KernelRounding(const Geometry& geometry, const Span& span) const {
  return RoundingOf(GetParam().spec, GetParam().plan_options, geometry, span);
}

std::vector<AttentionTest::SpanOracle> AttentionTest::OraclesOf(const AttentionBatch& batch,
                                                                bool long_kv) const {
  const Geometry& g = batch.geometry;
  const bool has_unfused = !long_kv && g.precision == Precision::k16Bit && !SumsInFloat16();
  std::vector<SpanOracle> oracles(batch.num_spans);
  for (int32_t s = 0; s < batch.num_spans; ++s) {
    const Span& span = batch.spans[s];
    oracles[s].bounds = ExpectedOf(g, span, KernelRounding(g, span));
    if (!has_unfused) continue;
    oracles[s].reference = ReferenceAttention({g, &span, 1});
    oracles[s].unfused = UnfusedAttention({g, &span, 1});
  }
  return oracles;
}

void AttentionTest::Check(Problem* problem, bool long_kv) {
  const AttentionBatch batch = problem->batch();
  const std::vector<SpanOracle> oracles = OraclesOf(batch, long_kv);
  // CUDA kernels: large tiles, then small tiles.
  const bool cpu = GetParam().spec.arch == Arch::kCpu;
  for (int threads : cpu ? std::vector<int>{2} : std::vector<int>{1, 2}) {
    for (int64_t target : Targets()) {
      SCOPED_TRACE(hwy::TargetName(target) + (", threads " + std::to_string(threads)));
      const ScopedTarget scoped(target);
      problem->PoisonOutputs();
      Run(batch, threads);
      for (int s = 0; s < problem->num_spans(); ++s) {
        SCOPED_TRACE("span " + std::to_string(s));
        CheckSpan(problem->span(s), oracles[s]);
      }
    }
  }
}

void AttentionTest::CheckFamilies(const std::string& name) {
  const std::vector<Family> families = FamiliesNamed(name);
  ASSERT_FALSE(families.empty());
  for (const Family& family : families) {
    if (SumsInFloat16() && !family.fits_float16_sums) continue;
    SCOPED_TRACE(std::to_string(family.heads) + " heads over " + std::to_string(family.kv_heads));
    FamilyProblem problem(family, MakeGeometry(family.heads, family.kv_heads), &random_);
    Check(problem.get(), family.long_kv);
  }
}

}  // namespace flashcore::kernels
