// Everything about one instantiation of the kernel that is known at compile time.
#ifndef FLASHCORE_KERNELS_SM80_CONFIG_CUH_
#define FLASHCORE_KERNELS_SM80_CONFIG_CUH_

#include "kernels/attention.h"
#include "kernels/smxx/row_output.cuh"
#include "kernels/tile_config.h"

namespace flashcore::kernels::sm80 {

template <class Element_, int kHeadDim_, int kRows_>
struct Config {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRows = kRows_;  // packed rows of the block's tile

  static constexpr Sm80Block kBlock = Sm80BlockFor(kRows, kHeadDim);
  static constexpr int kRowWarps = kBlock.row_warps;
  static constexpr int kTokenWarps = kBlock.token_warps;
  static constexpr int kStages = kBlock.stages;
  static constexpr int kThreads = 32 * kRowWarps * kTokenWarps;
  static constexpr int kWarpTokens = kPageTokens / kTokenWarps;

  // A warp's accumulators, in tiles of 16 rows x 8 columns.
  static constexpr int kScoreTiles = kWarpTokens / 8;
  static constexpr int kOutputTiles = kHeadDim / 8;
  // Up to here Q stays in registers; beyond, O takes them and Q is read from shared memory again
  // for every K tile.
  static constexpr bool kQueryInRegisters = kHeadDim <= 128;
  // Steps of Q K^T side by side: all 16 of head_dim 256 would need more registers than there are.
  static constexpr int kScoreUnroll = kQueryInRegisters ? kHeadDim / 16 : 4;

  // Shared memory of the main loop, bytes: Q, then the stages of K, then those of V.
  static constexpr int kQueryBytes = kRows * kHeadDim * 2;
  static constexpr int kTileBytes = kPageTokens * kHeadDim * 2;
  static constexpr int kMainloopBytes = kQueryBytes + 2 * kStages * kTileBytes;

  // Then of the epilogue, in the same place: per token warp and row O (padded so that a warp's
  // stores hit every bank once), the maximum and the sum.
  static constexpr int kStagedRow = kHeadDim + 8;  // floats
  static constexpr int kStagedRows = kTokenWarps * kRows;
  static constexpr int kEpilogueBytes = kStagedRows * (kStagedRow + 2) * 4;

  static constexpr int kSharedBytes =
      kMainloopBytes > kEpilogueBytes ? kMainloopBytes : kEpilogueBytes;

  static_assert(kHeadDim % 32 == 0 && kHeadDim <= 256);
  static_assert(kRowWarps * 16 == kRows && kWarpTokens % 16 == 0);
  static_assert(kSharedBytes <= 99 * 1024, "sm_89 has 99 KB a block");
};

// What one thread keeps of its warp's 16 rows: rows lane / 4 + 8 * i of them, i = 0 and 1. Of tile
// n it has columns 8 * n + 2 * (lane % 4) and the next: [n][2 * i], [n][2 * i + 1].
template <class C>
struct State {
  float output[C::kOutputTiles][4] = {};  // unnormalised, relative to 2^max
  float max[2] = {-INFINITY, -INFINITY};  // of the scores so far, base 2; same in the row's 4 lanes
  float sum[2] = {0, 0};                  // of this lane's probabilities
};

// Where the calling thread stands in the block.
template <class C>
struct Position {
  int lane = threadIdx.x % 32;
  int row_warp = threadIdx.x / 32 / C::kTokenWarps;
  int token_warp = threadIdx.x / 32 % C::kTokenWarps;

  // Its row i (0 or 1) in the block's tile.
  __device__ __forceinline__ int Row(int i) const { return row_warp * 16 + lane / 4 + 8 * i; }
};

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_CONFIG_CUH_
