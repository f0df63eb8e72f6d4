// Everything about one instantiation of the kernel that is known at compile time.
#ifndef FLASHCORE_KERNELS_SM80_CONFIG_CUH_
#define FLASHCORE_KERNELS_SM80_CONFIG_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "kernels/attention.h"
#include "kernels/sm80/accumulators.cuh"
#include "kernels/smxx/row_output.cuh"
#include "kernels/tile_config.h"

namespace flashcore::kernels::sm80 {

// Sum is what Q K^T and P V are summed in: float, or __half. KvElement is what K and V are read as:
// Element, or __nv_fp8_e4m3, which becomes float16 on its way to the multiplications.
template <class Element_, int kHeadDim_, int kRows_, class Sum_ = float,
          class KvElement_ = Element_>
struct Config {
  using Element = Element_;
  using Sum = Sum_;
  using KvElement = KvElement_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRows = kRows_;  // packed rows of the block's tile

  // A row of K or V takes as much shared memory as so many 16-bit elements, and what ldmatrix loads
  // of it at a time, 32 bytes, has operands of so many multiplications of 16 components each.
  static constexpr int kKvWidth = kHeadDim * static_cast<int>(sizeof(KvElement)) / 2;
  static constexpr int kStepOperands = kHeadDim / kKvWidth;
  static constexpr int kSteps = kKvWidth / 16;

  static constexpr Sm80Block kBlock = Sm80BlockFor(kRows, kHeadDim);
  static constexpr int kRowTiles = kBlock.row_tiles;
  static constexpr int kRowWarps = kBlock.row_warps;
  static constexpr int kTeams = kBlock.teams;
  static constexpr int kTileTokens = kBlock.tile_tokens;
  static constexpr int kStages = kBlock.stages * kStepOperands;  // as many bytes on their way
  static constexpr int kMinBlocks = kBlock.min_blocks;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kTeamThreads = 32 * kRowWarps;
  static constexpr int kThreads = kTeams * kTeamThreads;

  // A warp's accumulators, in tiles of 16 rows x 8 columns, for each of its row tiles.
  static constexpr int kScoreTiles = kTileTokens / 8;
  static constexpr int kOutputTiles = kHeadDim / 8;
  // Up to here Q stays in registers; beyond, O takes them and Q is read from shared memory again
  // for every K tile.
  static constexpr bool kQueryInRegisters = kHeadDim <= (kRowTiles == 1 ? 128 : 32);
  // Whether a tile's scores wait in registers while the next one's are multiplied: up to head_dim
  // 64, where exponentials take as long as multiplications, and as far as registers allow.
  static constexpr bool kLooksAhead = kHeadDim <= 64 && kRowTiles * kStepOperands <= 2;
  // Steps of Q K^T side by side: all 16 of head_dim 256 would need more registers than there are.
  static constexpr int kScoreUnroll = kQueryInRegisters ? kSteps : 4 / kStepOperands;

  // Shared memory of the main loop, bytes: stage 0 of every team, stage 1 of every team, ..., each
  // a V and a K tile; Q; and what each row sees. Q that moves on to registers lies in the last
  // stage if it fits there, which is filled last.
  static constexpr int kTileBytes = kTileTokens * kKvWidth * 2;
  static constexpr int kStageStride = kTeams * 2 * kTileBytes;
  static constexpr int kQueryBytes = kRows * kHeadDim * 2;
  static constexpr bool kQueryInStages = kQueryInRegisters && kQueryBytes <= kStageStride;
  static constexpr int kQueryOffset = (kQueryInStages ? kStages - 1 : kStages) * kStageStride;
  static constexpr int kSeenOffset = kStages * kStageStride + (kQueryInStages ? 0 : kQueryBytes);
  static constexpr int kMainloopBytes = kSeenOffset + kRows * 8;

  // Then of the epilogue, in the same place. Each team merges kShareTiles tiles of every row of
  // output: what the others have of them passes through shared memory, in pieces of 16 bytes a
  // lane, as do maxima and sums. Then rows wait there as elements, kStagedPitch bytes apart.
  static constexpr int kShareTiles = kOutputTiles / kTeams;
  static constexpr int kPassedTiles = kTeams == 2 ? kShareTiles : kTeams > 2 ? kOutputTiles : 0;
  static constexpr int kStagedPitch = kShareTiles * 16 + (kShareTiles % 2 == 0 ? 16 : 0);
  static constexpr int kStatBytes = kTeams == 1 ? 0 : 16 * kRowTiles * kThreads;
  static constexpr int kPassedBytes = kThreads * kRowTiles * kPassedTiles * 16;
  static constexpr int kStagedOffset = kStatBytes + kPassedBytes;
  static constexpr int kEpilogueBytes = kStagedOffset + kTeams * kRows * kStagedPitch;

  static constexpr int kSharedBytes =
      kMainloopBytes > kEpilogueBytes ? kMainloopBytes : kEpilogueBytes;

  static_assert(kHeadDim % 32 == 0 && kHeadDim <= 256);
  static_assert(std::is_same_v<KvElement, Element> ||
                (std::is_same_v<KvElement, __nv_fp8_e4m3> && std::is_same_v<Element, __half>));
  static_assert(kKvWidth % 32 == 0 && kShareTiles % kStepOperands == 0);
  static_assert(kRowWarps * kWarpRows == kRows);
  static_assert(kPageTokens % kTileTokens == 0 && kTileTokens % 16 == 0);
  static_assert((kTeams & (kTeams - 1)) == 0 && kStages >= 2);
  static_assert(kOutputTiles % kTeams == 0);
  static_assert(kSharedBytes <= 99 * 1024, "sm_89 has 99 KB a block");
};

// What one thread keeps of its warp's rows: of row tile m the rows lane / 4 + 8 * i, i = 0 and 1.
// Of tile n it has two columns, from Column(n) on: [m][n][2 * i], [m][n][2 * i + 1].
template <class C>
struct State {
  // Unnormalised, relative to 2^base.
  Accumulators<typename C::Sum> output[C::kRowTiles][C::kOutputTiles];
  float max[C::kRowTiles][2];  // what base comes from: about the largest score so far; the same in
                               // the row's 4 lanes
  float sum[C::kRowTiles][2];  // of this lane's probabilities
  // Of all probabilities as P V sees them, rounded: a tile of P 1, whose columns are all the same.
  // Float32 always: float16 cannot count further than to 2048.
  float rounded_sum[C::kRowTiles][4];

  __device__ __forceinline__ State() {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < C::kOutputTiles; ++n) output[m][n].Clear();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        max[m][i] = -INFINITY;
        sum[m][i] = 0;
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) rounded_sum[m][c] = 0;
    }
  }
};

// Where the calling thread stands in the block. A team is the warps that walk over the same K/V
// tiles, every kTeams-th of the item's; its warps share the tile's rows.
template <class C>
struct Position {
  int lane = threadIdx.x % 32;
  int row_warp = threadIdx.x / 32 % C::kRowWarps;
  int team = threadIdx.x / 32 / C::kRowWarps;

  // Its row i (0 or 1) of row tile m in the block's tile.
  __device__ __forceinline__ int Row(int m, int i) const {
    return row_warp * C::kWarpRows + m * 16 + lane / 4 + 8 * i;
  }

  // The first of its two columns of output tile n. Of E4M3 V, a lane has fours of columns
  // (operands.cuh), two in each tile of a pair.
  __device__ __forceinline__ int Column(int n) const {
    return C::kStepOperands == 1 ? 8 * n + lane % 4 * 2 : 16 * (n / 2) + lane % 4 * 4 + 2 * (n % 2);
  }
};

// Waits for the team's other threads.
template <class C>
__device__ __forceinline__ void SyncTeam(int team) {
  if constexpr (C::kTeams == 1) {
    __syncthreads();
  } else if constexpr (C::kTeamThreads == 32) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(C::kTeamThreads) : "memory");
  }
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_CONFIG_CUH_
