// Fixture of the tests that run on every kernel of the registry: runs a batch and compares it with
// the float64 oracle.
#ifndef FLASHCORE_TESTS_KERNELS_ATTENTION_FIXTURE_H_
#define FLASHCORE_TESTS_KERNELS_ATTENTION_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <iosfwd>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/thread_pool.h"
#include "kernels/plan.h"
#include "kernels/registry.h"
#include "tests/kernels/kernel_rounding.h"
#include "tests/kernels/problem.h"

namespace flashcore::kernels {

// How GoogleTest names a kernel in its messages.
void PrintTo(const Kernel& kernel, std::ostream* out);

// The kernels of the registry whose spec is as asked.
template <class IsAsked>
std::vector<Kernel> KernelsWhere(const IsAsked& is_asked) {
  std::vector<Kernel> kernels;
  for (const Kernel& kernel : AllKernels()) {
    if (is_asked(kernel.spec)) kernels.push_back(kernel);
  }
  return kernels;
}

// CpuSimdTargets(), computed once.
const std::vector<int64_t>& SimdTargets();

// Limits launches to one SIMD target of SimdTargets() while it lives.
class ScopedTarget {
 public:
  explicit ScopedTarget(int64_t target) { Use(target); }
  ~ScopedTarget() { Use(0); }

 private:
  static void Use(int64_t target);
};

// Parametrised over AllKernels(). Inputs are fresh in every run; FLASHCORE_TEST_SEED repeats one.
class AttentionTest : public testing::TestWithParam<Kernel> {
 protected:
  AttentionTest();

  // Skips a CUDA kernel where there is no CUDA device.
  void SetUp() override;

  // The SIMD targets to run the kernel on. For a CUDA kernel: only the best one.
  std::vector<int64_t> Targets() const;

  Geometry MakeGeometry(int32_t heads, int32_t kv_heads) const {
    const KernelSpec& spec = GetParam().spec;
    return {spec.dtype, heads, kv_heads, spec.head_dim, spec.kv_dtype, spec.precision};
  }

  Rounding KernelRounding(const Geometry& geometry, const Span& span) const;

  // The workers that Run plans for. CUDA kernels: enough that spans are split.
  int32_t WorkersOf(int threads) const;

  // Sums in float16 overflow beyond 65504.
  bool SumsInFloat16() const { return GetParam().spec.accumulate == Accumulate::kFloat16; }

  // Runs `batch` on one thread or on several.
  void Run(const AttentionBatch& batch, int threads = 2) {
    Run(batch, threads, GetParam().plan_options);
  }
  void Run(const AttentionBatch& batch, int threads, const PlanOptions& options);

  // Runs `problem` on each of Targets() and compares it with the oracle. `long_kv`: not with
  // unfused attention, which takes long.
  void Check(Problem* problem, bool long_kv = false);

  // Check on the families of one name (families.h).
  void CheckFamilies(const std::string& name);

  std::mt19937_64 random_;

 private:
  // The expected results of a span. `reference`, of Q as it is, and `unfused` are empty if it is
  // not compared with them.
  struct SpanOracle {
    AttentionResult reference;
    AttentionResult unfused;
    Expected bounds;
  };
  std::vector<SpanOracle> OraclesOf(const AttentionBatch& batch, bool long_kv) const;
  void CheckSpan(const ProblemSpan& span, const SpanOracle& oracle) const;

  ThreadPool one_thread_{1};
  ThreadPool many_threads_{3};
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_KERNELS_ATTENTION_FIXTURE_H_
