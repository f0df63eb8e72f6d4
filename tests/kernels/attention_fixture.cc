#include "tests/kernels/attention_fixture.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <string>

#include "hwy/targets.h"
#include "kernels/cpu/attention_cpu.h"
#include "kernels/half.h"
#include "tests/kernels/launch.h"
#ifdef FLASHCORE_HAVE_CUDA
#include "tests/kernels/device_mirror.h"
#endif

namespace flashcore::kernels {
namespace {

uint64_t Seed() {
  static const uint64_t kSeed = [] {
    const char* asked = std::getenv("FLASHCORE_TEST_SEED");
    const uint64_t seed =
        asked != nullptr ? std::strtoull(asked, nullptr, 10) : std::random_device{}();
    std::cout << "FLASHCORE_TEST_SEED=" << seed << std::endl;
    return seed;
  }();
  return kSeed;
}

struct Errors {
  double kernel = 0;  // largest absolute difference to the oracle
  double unfused = 0;
  double largest = 0;  // largest finite magnitude of the oracle's values

  void Add(double got, double unfused_value, double want) {
    if (std::isinf(want)) {
      EXPECT_EQ(got, want);
      return;
    }
    kernel = std::max(kernel, std::isnan(got) ? INFINITY : std::abs(got - want));
    unfused = std::max(unfused, std::abs(unfused_value - want));
    largest = std::max(largest, std::abs(want));
  }
};

// Largest error with float16 sums: of O, divided by the largest magnitude in V; of LSE.
constexpr double kFloat16SumsError = 2e-2;

double LargestValue(const Geometry& g, const KvView& kv) {
  double largest = 0;
  for (int32_t j = 0; j < kv.rows; ++j) {
    const int32_t tile = j / kPageTokens;
    const int64_t page = kv.pages != nullptr ? kv.pages[tile] : tile;
    for (int32_t h = 0; h < g.num_kv_heads; ++h) {
      const auto* row = reinterpret_cast<const uint16_t*>(
          kv.value + page * kv.page_stride + h * kv.head_stride + j % kPageTokens * kv.row_stride);
      for (int32_t d = 0; d < g.head_dim; ++d) {
        largest = std::max(largest, std::abs(double{ToFloat(g.dtype, row[d])}));
      }
    }
  }
  return largest;
}

}  // namespace

void PrintTo(const Kernel& kernel, std::ostream* out) {
  const KernelSpec& spec = kernel.spec;
  *out << Name(spec.arch) << "_" << Name(spec.dtype) << "_d" << spec.head_dim << "_"
       << Name(spec.accumulate);
  if (spec.kv_dtype != KvDType::kSameAsQuery) *out << "_kv_" << Name(spec.kv_dtype);
}

const std::vector<int64_t>& SimdTargets() {
  static const std::vector<int64_t> kTargets = CpuSimdTargets();
  return kTargets;
}

void ScopedTarget::Use(int64_t target) {
  hwy::SetSupportedTargetsForTest(target);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

AttentionTest::AttentionTest() : random_(Seed()) {}

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
  // CUDA kernels: threads == 1 plans for one worker (large tiles), otherwise for many (small
  // tiles).
  const bool cpu = GetParam().spec.arch == Arch::kCpu;
  Plan plan;
  MakePlan(batch, options, cpu ? pool.num_threads() : threads == 1 ? 1 : 10000, &plan);
  ASSERT_EQ(Launch(GetParam(), batch, plan, &pool), 0);
}

// Bound with float32 sums: twice the error of unfused attention, plus one rounding of the largest
// value, for results that unfused attention happens to hit exactly.
void AttentionTest::CheckSpan(const ProblemSpan& span, const ReferenceResult& oracle,
                              const ReferenceResult& unfused, size_t row_begin) {
  const Geometry g = MakeGeometry(0, 1);
  const std::vector<uint16_t> output = span.Output();
  const std::vector<float> lse = span.Lse();
  Errors errors, lse_errors;
  for (size_t n = 0; n < output.size(); ++n) {
    const size_t at = row_begin * g.head_dim + n;
    errors.Add(ToFloat(g.dtype, output[n]), unfused.output[at], oracle.output[at]);
  }
  for (size_t n = 0; n < lse.size(); ++n) {
    lse_errors.Add(lse[n], unfused.lse[row_begin + n], oracle.lse[row_begin + n]);
  }
  const double rounding = g.dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
  double bound = 2 * errors.unfused + rounding * errors.largest + 0x1p-25;
  double lse_bound = 2 * lse_errors.unfused + 4e-6 * (1 + lse_errors.largest);
  if (SumsInFloat16()) {
    bound = kFloat16SumsError * LargestValue(g, span.span().kv);
    lse_bound = kFloat16SumsError;
  }
  EXPECT_LE(errors.kernel, bound);
  EXPECT_LE(lse_errors.kernel, lse_bound);
  EXPECT_TRUE(span.PaddingIsUntouched());
}

void AttentionTest::Check(Problem* problem) {
  const AttentionBatch batch = problem->batch();
  const ReferenceResult oracle = ReferenceAttention(batch);
  const ReferenceResult unfused = UnfusedAttention(batch);
  // CUDA kernels: large tiles, then small tiles.
  const bool cpu = GetParam().spec.arch == Arch::kCpu;
  for (int threads : cpu ? std::vector<int>{2} : std::vector<int>{1, 2}) {
    for (int64_t target : Targets()) {
      SCOPED_TRACE(hwy::TargetName(target) + (", threads " + std::to_string(threads)));
      const ScopedTarget scoped(target);
      for (int s = 0; s < problem->num_spans(); ++s) problem->span(s).PoisonOutputs();
      Run(batch, threads);
      size_t row_begin = 0;
      for (int s = 0; s < problem->num_spans(); ++s) {
        SCOPED_TRACE("span " + std::to_string(s));
        CheckSpan(problem->span(s), oracle, unfused, row_begin);
        row_begin += size_t{1} * batch.spans[s].query_rows * batch.geometry.num_heads;
      }
    }
  }
}

}  // namespace flashcore::kernels
