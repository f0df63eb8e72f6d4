// The second part of Config: how a kernel computes it. T: ConfigTypes.
//
// A block runs one work tile (work_list.h). Its warps form a grid. The warps of a KV warp group
// read the same K/V tiles and divide the packed rows; the groups divide the K/V tiles. (A Hopper
// "warpgroup" is always 4 warps; a KV warp group has kRowWarps.) A phase is the K/V tiles of one
// group, or with kStashes, of one group the even ones or the odd ones. For kRowTiles = 1, kRowWarps
// = 4 and kWarpGroups = 2:
//
//             rows 0-15   rows 16-31   rows 32-47   rows 48-63
//   group 0   warp 0      warp 1       warp 2       warp 3       K/V tiles 0, 2, 4, ...
//   group 1   warp 4      warp 5       warp 6       warp 7       K/V tiles 1, 3, 5, ...
//
// With kAddsPhases, which is for spans of up to 16 packed rows, there are as many groups as splits
// in a run. In a run each attends a split: its phases one after the other, which it adds up.
#ifndef FLASHCORE_KERNELS_SM80_CONFIG_FEATURES_CUH_
#define FLASHCORE_KERNELS_SM80_CONFIG_FEATURES_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/attention.h"
#include "kernels/plan_options.h"
#include "kernels/sm80/config_types.cuh"
#include "kernels/sm80/tiles.h"

namespace flashcore::kernels::sm80 {

template <class T>
struct ConfigFeatures : T {
  static constexpr bool kRuns = T::kItems == Items::kRuns;
  static constexpr bool kCascades = T::kItems == Items::kCascades;
  static constexpr bool kSmallSpans = kCascades || T::kRows <= kSmallSpanRows;  // only
  // An mma has 16 packed rows, and 8 tokens or columns of V; if kTransposed, 16 tokens or columns,
  // and 8 rows. Then up to 8 rows take half as many mma, scores and registers.
  static constexpr bool kTransposed = T::kRows == kSmallestSpanRows;
  static constexpr int kMmaRows = kTransposed ? 8 : 16;
  static constexpr int kMmaColumns = kTransposed ? 16 : 8;
  static constexpr int kRowStep = kTransposed ? 1 : 8;  // between the two that a lane has of them
  static constexpr int kTokenStep = kTransposed ? 8 : 1;

  static constexpr Block kBlock =
      kCascades ? CascadeBlock(T::kHeadDim) : BlockFor(T::kRows, T::kHeadDim, T::kArch);
  static constexpr int kRowTiles = kBlock.row_tiles;
  static constexpr int kRowWarps = kBlock.row_warps;
  static constexpr int kPhases = kBlock.phases;
  static constexpr int kWarpGroups = kBlock.warp_groups;
  static constexpr int kTileTokens = kBlock.tile_tokens;
  static constexpr bool kAddsPhases = kRuns && kSmallSpans;
  static constexpr bool kAddsSplits = kRuns && !kAddsPhases;  // of a run, through memory
  // Q K^T of codes leaves registers for another block, where shared memory has room for it. For
  // sm_80, ptxas would spill, and for P V of codes.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  static constexpr bool kThreeBlocks = false;
#else
  static constexpr bool kThreeBlocks = T::kQueryParts == 1 && !T::kCodeValues &&
                                       T::kHeadDim == 128 && T::kRows == 64 &&
                                       T::kArch == Arch::kLargeShared;
#endif
  static constexpr int kMinBlocks = kAddsPhases && !kTransposed ? 2  // sums take registers
                                    : kThreeBlocks              ? 3
                                                                : kBlock.min_blocks;
  static constexpr int kWarpRows = kMmaRows * kRowTiles;
  static constexpr int kGroupThreads = 32 * kRowWarps;
  static constexpr int kThreads = kWarpGroups * kGroupThreads;

  // ldmatrix reads 32 bytes of a K or V row per step: 16 components for one mma, or with codes 32
  // components for two.
  static constexpr int kQueryRowBytes = T::kHeadDim * 2;
  static constexpr int kKvRowBytes = T::kHeadDim * static_cast<int>(sizeof(typename T::KvElement));
  static constexpr int kSteps = kKvRowBytes / 32;
  static constexpr int kStepMmas = T::kCodes ? 2 : 1;
  static constexpr int kQueryMmas = T::kQueryParts > 0 ? T::kQueryParts : kStepMmas;
  static constexpr bool kSingleBuffers = kBlock.single_buffers;
  // With kSingleBuffers, buffers each for K and for V.
  static constexpr int kBuffers =
      kSingleBuffers && !kCascades ? BuffersFor(T::kRows, T::kHeadDim, T::kArch,
                                                T::kCodes ? KvDType::kInt8 : KvDType::kSameAsQuery,
                                                T::kPrecision, kAddsPhases)
                                   : 1;
  static constexpr bool kStashes = kBlock.Stashes();  // attends two phases in turn
  // The same bytes in flight for codes.
  static constexpr int kStages = kSingleBuffers ? kBuffers : 2 * kStepMmas;

  // Whether the last block of a work tile combines its partial results. With more rows, one block
  // would take longer than another launch.
  static constexpr bool kCombines = kSmallSpans && !kCascades;

  // Accumulator tiles (kMmaRows x kMmaColumns) of a warp, for each of its row tiles.
  static constexpr int kScoreTiles = kTileTokens / kMmaColumns;
  static constexpr int kOutputTiles = T::kHeadDim / kMmaColumns;
  // Sums of probabilities go by token % 8, so that a row has the same bits in all blocks for small
  // spans: if a lane has two, even tokens and odd tokens have a sum each.
  static constexpr bool kTwoSums = T::kCodes && kSmallSpans && !kTransposed;
  // Otherwise O needs the registers, and every K tile reads Q from shared memory again.
  static constexpr bool kQueryInRegisters =
      !T::kCodeValues && T::kHeadDim <= (kRowTiles == 1        ? 128
                                         : T::kQueryParts == 1 ? 64
                                                               : 32);
  // Where a group is a warp, a barrier costs little. V of the first tile is asked for before Q has
  // been read, so Q is in no stage.
  static constexpr bool kCopiesEarly = kSingleBuffers && kGroupThreads == 32;
  // Whether the output leaves so few registers that places are computed again for each tile.
  static constexpr bool kFewRegisters = kSingleBuffers && T::kHeadDim > 64;
  // The work tile is copied to shared memory to free its address register. Two of these blocks have
  // room on an SM of sm_89 by their layout: Q at 0; its codes reuse the first half; V the last
  // quarter; then K.
  static constexpr bool kPacksQuery = T::kCodeValues && kFewRegisters && kRowTiles == 2;
  // Pipelined main loop: two tiles of scores in registers. It pays up to head_dim 64, where
  // exponentials take as long as multiplications, and only if the registers suffice.
  // They do not if the scales of V must wait for P, too.
  static constexpr bool kPipelined = T::kHeadDim <= 64 && !kSingleBuffers && !T::kCodes;
  // Unrolled steps of Q K^T: as many as the registers allow. Each step beyond saves two
  // instructions of a loop, and reads Q and K ahead.
  static constexpr int kScoreUnroll =
      kQueryInRegisters || T::kHeadDim == 96 || T::kHeadDim == 256 ? kSteps : 4 / kStepMmas;
};

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_CONFIG_FEATURES_CUH_
