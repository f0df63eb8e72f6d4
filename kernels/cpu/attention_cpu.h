// Fused attention on the CPU: SIMD chosen at run time, work shared by a ThreadPool.
#ifndef FLASHCORE_KERNELS_CPU_ATTENTION_CPU_H_
#define FLASHCORE_KERNELS_CPU_ATTENTION_CPU_H_

#include <cstdint>
#include <vector>

#include "kernels/attention.h"
#include "kernels/plan.h"
#include "kernels/registry.h"

namespace flashcore::kernels {

// The Launcher of every CPU row of the registry: head_dim a multiple of 32 and at most 256, both
// dtypes, float32 accumulation. Runs on ctx.threads and the calling thread; returns 0 when O and
// LSE are complete. Allocates only a thread's scratch (half a megabyte), on its first work item.
int LaunchAttentionCpu(const AttentionBatch& batch, const Plan& plan, const LaunchContext& ctx);

// The SIMD instruction set that launches use on this machine: "AVX3" (Highway's word for AVX-512),
// "AVX2", ...
const char* CpuSimdTarget();

// Every SIMD target (HWY_AVX3, ...) that is both compiled in and supported by this machine, best
// first. Tests run each with hwy::SetSupportedTargetsForTest.
std::vector<int64_t> CpuSimdTargets();

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CPU_ATTENTION_CPU_H_
