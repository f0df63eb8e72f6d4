#include "kernels/cpu/attention_cpu.h"

#include <functional>
#include <memory>

#include "kernels/cpu/thread_pool.h"

// One target per vector width is enough: nothing here uses what SSSE3 or AVX3_DL add or lack.
// Scalable vectors (SVE, RISC-V) cannot be kept in arrays, so those machines use the next best.
#define FLASHCORE_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
// A sanitizer build checks two targets, the widest that every x86 machine of today has and the
// baseline: each takes more than a minute to compile there, and the source is the same.
#ifdef FLASHCORE_SANITIZED
#define HWY_DISABLED_TARGETS (FLASHCORE_DISABLED_TARGETS | HWY_SSE4 | HWY_AVX3)
#else
#define HWY_DISABLED_TARGETS FLASHCORE_DISABLED_TARGETS
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_cpu.cc"
#include "hwy/foreach_target.h"  // includes this file once per target
// Must come after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/attend-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flashcore::kernels {
namespace HWY_NAMESPACE {

int64_t Target() { return HWY_TARGET; }

}  // namespace HWY_NAMESPACE
}  // namespace flashcore::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashcore::kernels {

HWY_EXPORT(AttendItem);
HWY_EXPORT(CombineItemSplits);
HWY_EXPORT(Target);

namespace {

void ChooseTarget() {
  if (!hwy::GetChosenTarget().IsInitialized()) {
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
}

// Below this many multiplications of Q K^T (about 80 us) a launch stays on the calling thread. More
// threads save little more than it takes to wake and join them, and they spin before and after on
// cores that the RPC threads need.
constexpr int64_t kMinParallelWork = 512 * 1024;

int64_t Work(const Plan& plan, int32_t head_dim) {
  int64_t scores = 0;
  for (const WorkItem& item : plan.items) {
    scores += int64_t{item.row_count} * (item.kv_end - item.kv_begin);
  }
  return scores * head_dim;
}

// Lives as long as the thread. No result depends on its earlier content.
Scratch* ThreadScratch() {
  thread_local const std::unique_ptr<Scratch> scratch = std::make_unique<Scratch>();
  return scratch.get();
}

}  // namespace

int LaunchAttentionCpu(const AttentionBatch& batch, const Plan& plan, const LaunchContext& ctx) {
  ChooseTarget();
  const auto attend = &HWY_DYNAMIC_DISPATCH(AttendItem);
  const auto combine = &HWY_DYNAMIC_DISPATCH(CombineItemSplits);
  const Partials partials(static_cast<float*>(ctx.workspace), plan.partial_rows,
                          batch.geometry.head_dim);
  const auto attend_item = [&](int i, int) {
    attend(batch, plan, plan.items[i], partials, ThreadScratch());
  };
  const auto combine_item = [&](int i, int) {
    combine(batch, plan.combines[i], partials, ThreadScratch());
  };
  const int items = static_cast<int>(plan.items.size());
  const int combines = static_cast<int>(plan.combines.size());
  if (Work(plan, batch.geometry.head_dim) < kMinParallelWork) {
    for (int i = 0; i < items; ++i) attend_item(i, 0);
    for (int i = 0; i < combines; ++i) combine_item(i, 0);
    return 0;
  }
  // By reference: std::function would allocate for a copy of these lambdas.
  ctx.threads->ParallelFor(items, std::ref(attend_item));
  ctx.threads->ParallelFor(combines, std::ref(combine_item));
  return 0;
}

const char* CpuSimdTarget() {
  ChooseTarget();
  return hwy::TargetName(HWY_DYNAMIC_DISPATCH(Target)());
}

std::vector<int64_t> CpuSimdTargets() { return hwy::SupportedAndGeneratedTargets(); }

}  // namespace flashcore::kernels
#endif  // HWY_ONCE
