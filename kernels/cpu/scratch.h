// What one CPU thread works in: the tiles of one work item, in float32.
#ifndef FLASHCORE_KERNELS_CPU_SCRATCH_H_
#define FLASHCORE_KERNELS_CPU_SCRATCH_H_

#include "kernels/attention.h"
#include "kernels/tile_config.h"

namespace flashcore::kernels {

inline constexpr int kMaxLanes = 16;  // float32 lanes of the widest vector

// Strides are head_dim, so short heads use the front of each array only. r is a packed row, j a
// token of the tile, d a component.
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
  alignas(64) uint16_t zeros[kCpuMaxHeadDim];             // a K row for tokens that do not exist
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CPU_SCRATCH_H_
