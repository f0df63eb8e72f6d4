// The last part of Config: where everything is in shared memory. F: ConfigFeatures.
//
// Shared memory, for kStages = 2. The epilogue reuses the memory of the main loop.
//
//   main loop                                     epilogue
//   0                +-------------------------+  0               +--------------------------+
//                    | stage 0   group 0  V, K |                  | max and sum of each row  |
//                    |           group 1  V, K |  kStatBytes      +--------------------------+
//   kStageStride     +-------------------------+                  | output tiles for the     |
//                    | stage 1   group 0  V, K |                  | cross-warp reduce        |
//                    |           group 1  V, K |  kStagingOffset  +--------------------------+
//                    +-------------------------+                  | finished rows of O,      |
//                    | Q                       |                  | a slice for each warp    |
//   kVisibleOffset   +-------------------------+  kEpilogueBytes  +--------------------------+
//                    | visible tokens of a row |
//   kMainloopBytes   +-------------------------+
//   kStashOffset     +-------------------------+
//                    | first phase (stash.cuh) |
//   kWorkTileOffset  +-------------------------+
//                    | work tile               |
//   kSharedBytes     +-------------------------+
//
// With one warp group, the epilogue has staging only. With kQueryInStages, Q starts in the last
// stage, moves to registers, and then K and V overwrite it. With kSingleBuffers there is one stage,
// or kBuffers of them, and Q may start in the V of the last. With kPacksQuery, Q comes first. With
// kCodes, a K tile is followed by the scales of its rows, and of the rows of V. After the visible
// tokens are the factors of Q's rows, with kQueryParts, and with kCodes for each warp group what
// follows from a tile's scales (RowFactors).
#ifndef FLASHCORE_KERNELS_SM80_CONFIG_LAYOUT_CUH_
#define FLASHCORE_KERNELS_SM80_CONFIG_LAYOUT_CUH_

#include "kernels/attention.h"
#include "kernels/cuda/work_list.h"
#include "kernels/sm80/config_features.cuh"

namespace flashcore::kernels::sm80 {

template <class F>
struct ConfigLayout : F {
  static constexpr int kTileBytes = F::kTileTokens * F::kKvRowBytes;
  static constexpr int kScaleBytes = F::kCodes ? 2 * F::kTileTokens * 2 : 0;  // of K, then of V
  static constexpr int kGroupBytes = 2 * kTileBytes + kScaleBytes;            // of a stage
  // With kCodes: K or V of a KV head in a page.
  static constexpr int kHeadPageBytes = kPageTokens * (F::kKvRowBytes + 2);
  static constexpr int kStageStride = F::kWarpGroups * kGroupBytes;
  static constexpr int kQueryBytes = F::kRows * F::kQueryRowBytes;
  static constexpr bool kQueryInStages =
      F::kQueryInRegisters && !F::kCopiesEarly &&
      kQueryBytes <= (F::kSingleBuffers ? kTileBytes : kStageStride);
  static constexpr int kQueryOperandBytes =
      F::kPacksQuery ? F::kQueryRowBytes / 2 : F::kQueryRowBytes;
  static constexpr int kStagesOffset = F::kPacksQuery ? kQueryBytes - kTileBytes : 0;
  static constexpr int kQueryOffset =
      F::kPacksQuery ? 0 : (kQueryInStages ? F::kStages - 1 : F::kStages) * kStageStride;
  static constexpr int kVisibleOffset = kStagesOffset + F::kStages * kStageStride +
                                        (kQueryInStages || F::kPacksQuery ? 0 : kQueryBytes);
  static constexpr int kQueryFactorOffset = kVisibleOffset + F::kRows * 8;
  static constexpr int kTableOffset = kQueryFactorOffset + (F::kQueryParts > 0 ? F::kRows * 4 : 0);
  static constexpr int kTableBytes = F::kCodes ? 12 * F::kTileTokens : 0;  // of a warp group
  static constexpr int kMainloopBytes = kTableOffset + F::kWarpGroups * kTableBytes;

  // Each warp group finishes a slice of kSliceTiles output tiles of every row, for which the other
  // groups store kReduceTiles tiles: with two groups only the other's slice, with more all tiles.
  static constexpr int kSliceTiles = F::kOutputTiles / F::kWarpGroups;
  static constexpr int kSliceColumns = kSliceTiles * F::kMmaColumns;
  static constexpr int kReduceTiles = F::kWarpGroups == 1   ? 0
                                      : F::kWarpGroups == 2 ? kSliceTiles
                                                            : F::kOutputTiles;
  static constexpr int kStatBytes = F::kWarpGroups == 1 ? 0 : 16 * F::kRowTiles * F::kThreads;
  // Row tiles whose output tiles are in shared memory at a time.
  static constexpr int kReduceRowTiles = F::kCascades ? 1 : F::kRowTiles;
  static constexpr int kStagingOffset =
      kStatBytes + 16 * kReduceRowTiles * F::kThreads * kReduceTiles;
  static constexpr int kStagingPitch = kSliceColumns * 2 + (kSliceColumns % 16 == 0 ? 16 : 0);
  // Cascade items write partial results only.
  static constexpr int kStagingBytes = F::kCascades ? 0 : F::kWarpGroups * F::kRows * kStagingPitch;
  static constexpr int kEpilogueBytes = kStagingOffset + kStagingBytes;

  static constexpr int kStashOffset =
      kMainloopBytes > kEpilogueBytes ? kMainloopBytes : kEpilogueBytes;
  static constexpr int kStashBytes =
      F::kStashes ? 16 * F::kRowTiles * (F::kOutputTiles + 1) * F::kThreads : 0;
  static constexpr int kWorkTileOffset = kStashOffset + kStashBytes;
  static constexpr int kSharedBytes =
      kWorkTileOffset + (F::kPacksQuery ? static_cast<int>(sizeof(WorkTile)) : 0);
};

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_CONFIG_LAYOUT_CUH_
