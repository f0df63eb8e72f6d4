// How the CPU kernels tile their work, each choice with its reason.
#ifndef FLASHCORE_KERNELS_CPU_TILES_H_
#define FLASHCORE_KERNELS_CPU_TILES_H_

#include <cstdint>

#include "kernels/plan.h"

namespace flashcore::kernels {

inline constexpr int32_t kCpuMaxHeadDim = 256;
inline constexpr int32_t kCpuMaxTileRows = 128;  // sizes the scratch of a CPU thread
inline constexpr int32_t kCpuFewRows = 16;       // work items up to this size read K/V in place

constexpr PlanOptions CpuPlan() {
  PlanOptions plan;
  // Converting and transposing a K/V tile is paid once per 128 rows (about 2% of the
  // multiplications). The working set (the float32 query, output and score tiles and one K and one
  // V tile: 128 KB at head_dim 64, 224 KB at 128, 416 KB at 256) stays in the L2 of a core.
  // Measured slower: 96 rows by 2%, 126 (a multiple of the register block) by 1%; at head_dim 256,
  // 64 rows by 2%.
  plan.tile_rows = 128;
  // A decode over 4096 rows becomes 8 items per KV head, enough for tens of threads. A split still
  // streams 128 KB or more, so merging it costs under 1%.
  plan.split_kv_rows = 512;
  // A span of up to 16 packed rows has one row tile per KV head: without splits a small batch could
  // not use every core. With more rows it is bound by arithmetic.
  plan.split_max_rows = 16;
  // Reading and converting K/V once for 64 rows instead of 128 costs less than the noise (32 rows:
  // 5%), and more items are easier to spread over cores.
  plan.cascade_rows = 64;
  return plan;
}
static_assert(IsSane(CpuPlan(), kCpuMaxTileRows));
// A span that is split must read K/V in place, because items shared between spans do.
static_assert(CpuPlan().split_max_rows <= kCpuFewRows);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CPU_TILES_H_
