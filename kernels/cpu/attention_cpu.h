// Fused attention on the CPU: SIMD chosen at run time, work items shared by a ThreadPool.
#ifndef FLASHCORE_KERNELS_CPU_ATTENTION_CPU_H_
#define FLASHCORE_KERNELS_CPU_ATTENTION_CPU_H_

#include <cstdint>
#include <vector>

#include "kernels/attention.h"
#include "kernels/cpu/tiles.h"
#include "kernels/kernel.h"
#include "kernels/plan.h"

namespace flashcore::kernels {

// The Launcher of every CPU row of the registry: head_dim a multiple of 32 and at most 256, both
// dtypes, K/V as the query or 8-bit, float32 accumulation. Runs on ctx.threads and the calling
// thread; returns 0 when O and LSE are complete. Allocates only the scratch of a thread (0.5 MB),
// on its first work item.
int LaunchAttentionCpu(const AttentionBatch& batch, const Plan& plan, const LaunchContext& ctx);

// The SIMD instruction set that launches use on this machine: "AVX3" (Highway's name for AVX-512),
// "AVX2", ...
const char* CpuSimdTarget();

// Every SIMD target (HWY_AVX3, ...) that is both compiled in and supported by this machine, best
// first. Tests run each with hwy::SetSupportedTargetsForTest.
std::vector<int64_t> CpuSimdTargets();

inline constexpr int kMaxLanes = 16;  // float32 lanes of the widest vector

// Working memory of one CPU thread: the tiles of one work item, in float32.
// Row strides are head_dim, so a small head_dim uses the front of each array only. r is a packed
// row of the item, j a token of the tile, d a component.
struct Scratch {
  static constexpr int kRows = kCpuMaxTileRows;

  alignas(64) float query[kRows * kCpuMaxHeadDim];        // [r][d], times softmax_scale * log2(e)
  alignas(64) float output[kRows * kCpuMaxHeadDim];       // [r][d], not yet divided by the sum
  alignas(64) float key[kCpuMaxHeadDim * kPageTokens];    // [d][j] transposed, or [j][d]
  alignas(64) float value[kPageTokens * kCpuMaxHeadDim];  // [j][d]
  alignas(64) float scores[kRows * kPageTokens];          // [r][j]: scores, then probabilities
  alignas(64) float sum[kRows * kMaxLanes];               // [r][lane]: sums of probabilities
  alignas(64) float max[kRows];                           // [r]: largest score so far, base 2
  alignas(64) float rescale[kRows];                       // [r]: 2^(old max - new max)
  alignas(64) std::byte zeros[2 * kCpuMaxHeadDim];        // K row of tokens beyond the tile's end
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CPU_ATTENTION_CPU_H_
