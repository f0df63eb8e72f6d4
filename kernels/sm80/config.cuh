// Compile-time configuration of one attention kernel: its warps and its shared memory.
//
// A block runs one work tile (work_list.h). Its warps form a grid. The warps of a KV warp group
// read the same K/V tiles and divide the packed rows; the groups divide the K/V tiles. (A Hopper
// "warpgroup" is always 4 warps; a KV warp group has kRowWarps.) A stream is the K/V tiles of one
// group, or with kStashes, of one group the even ones or the odd ones. For kRowTiles = 1, kRowWarps
// = 4 and kWarpGroups = 2:
//
//             rows 0-15   rows 16-31   rows 32-47   rows 48-63
//   group 0   warp 0      warp 1       warp 2       warp 3       K/V tiles 0, 2, 4, ...
//   group 1   warp 4      warp 5       warp 6       warp 7       K/V tiles 1, 3, 5, ...
//
// With kAddsStreams, which is for spans of up to 16 packed rows, there are as many groups as splits
// in a run. In a run each attends a split: its streams one after the other, which it adds up.
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
//                    | first stream (stash.cuh) |
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
#ifndef FLASHCORE_KERNELS_SM80_CONFIG_CUH_
#define FLASHCORE_KERNELS_SM80_CONFIG_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "kernels/attention.h"
#include "kernels/cuda/work_list.h"
#include "kernels/kernel.h"
#include "kernels/plan.h"
#include "kernels/sm80/tiles.h"

namespace flashcore::kernels::sm80 {

// Work items that a block can attend. Blocks for splits alone are 2 to 4% faster.
enum class Items : uint8_t {
  kSplits,
  kRuns,      // and splits
  kCascades,  // only
};

// Accum: type in which Q K^T and P V are summed, float or __half. KvElement: type of K and V in
// memory, Element, or __nv_fp8_e4m3 or int8_t. kRows: packed rows. Codes of E4M3 become Elements in
// registers, and those of V without kCodeValues ValueElements.
template <class Element_, int kHeadDim_, int kRows_, class Accum_ = float,
          class KvElement_ = Element_, Arch kArch = Arch::kSm80, Items kItems = Items::kSplits,
          Precision kPrecision = Precision::k16Bit>
struct Config {
  using Element = Element_;
  using Accum = Accum_;
  using KvElement = KvElement_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRows = kRows_;
  static constexpr bool kCodes = sizeof(KvElement) == 1;  // of 8 bits; each row has a scale
  // INT8 numbers that an element of Q becomes, for Q K^T with K's codes as they are: a higher and a
  // lower half, or one. 0: Q and K are multiplied as Elements.
  static constexpr int kQueryParts = !std::is_same_v<KvElement, int8_t> ? 0
                                     : kPrecision == Precision::k16Bit  ? 2
                                                                        : 1;
  // Type of P and V as they are multiplied. Codes of INT8 are exact in float16, and so is P to 11
  // bits: it is at most 2^kRescaleThreshold (score_scale.cuh).
  using ValueElement = std::conditional_t<(kQueryParts > 0), __half, Element>;
  static constexpr bool kCodeValues = kPrecision == Precision::kInt8QkPv;  // P and V, too
  // Whether the INT32 sums of P V, or of Q K^T, are floats from the start (kIntegerBase). For both
  // at head_dim 128 there are no registers.
  static constexpr bool kFloatValueSums = kCodeValues && kHeadDim > 64;
  static constexpr bool kFloatScoreSums = kQueryParts == 1 && !kFloatValueSums;

  static constexpr bool kRuns = kItems == Items::kRuns;
  static constexpr bool kCascades = kItems == Items::kCascades;
  static constexpr bool kSmallSpans = kCascades || kRows <= kSmallSpanRows;  // only
  // What an mma has 16 of, and what 8: packed rows and tokens, or columns of V; or if kTransposed
  // tokens, or columns, and rows. Then up to 8 rows take half as many mma, scores and registers.
  static constexpr bool kTransposed = kRows == kSmallestSpanRows;
  static constexpr int kMmaRows = kTransposed ? 8 : 16;
  static constexpr int kMmaColumns = kTransposed ? 16 : 8;
  static constexpr int kRowStep = kTransposed ? 1 : 8;  // between the two that a lane has of them
  static constexpr int kTokenStep = kTransposed ? 8 : 1;

  static constexpr Block kBlock =
      kCascades ? CascadeBlock(kHeadDim) : BlockFor(kRows, kHeadDim, kArch);
  static constexpr int kRowTiles = kBlock.row_tiles;
  static constexpr int kRowWarps = kBlock.row_warps;
  static constexpr int kStreams = kBlock.streams;
  static constexpr int kWarpGroups = kBlock.warp_groups;
  static constexpr int kTileTokens = kBlock.tile_tokens;
  static constexpr bool kAddsStreams = kRuns && kSmallSpans;
  static constexpr bool kAddsSplits = kRuns && !kAddsStreams;  // of a run, through memory
  // Q K^T of codes leaves registers for another block, where shared memory has room for it. For
  // sm_80, ptxas would spill, and for P V of codes.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  static constexpr bool kThreeBlocks = false;
#else
  static constexpr bool kThreeBlocks =
      kQueryParts == 1 && !kCodeValues && kHeadDim == 128 && kRows == 64 && kArch == Arch::kSm80;
#endif
  static constexpr int kMinBlocks = kAddsStreams && !kTransposed ? 2  // sums take registers
                                    : kThreeBlocks               ? 3
                                                                 : kBlock.min_blocks;
  static constexpr int kWarpRows = kMmaRows * kRowTiles;
  static constexpr int kGroupThreads = 32 * kRowWarps;
  static constexpr int kThreads = kWarpGroups * kGroupThreads;

  // ldmatrix reads 32 bytes of a K or V row per step: 16 components for one mma, or with codes 32
  // components for two.
  static constexpr int kQueryRowBytes = kHeadDim * 2;
  static constexpr int kKvRowBytes = kHeadDim * static_cast<int>(sizeof(KvElement));
  static constexpr int kSteps = kKvRowBytes / 32;
  static constexpr int kStepMmas = kCodes ? 2 : 1;
  static constexpr int kQueryMmas = kQueryParts > 0 ? kQueryParts : kStepMmas;
  static constexpr bool kSingleBuffers = kBlock.single_buffers;
  // With kSingleBuffers, buffers each for K and for V.
  static constexpr int kBuffers =
      kSingleBuffers && !kCascades
          ? BuffersFor(kRows, kHeadDim, kArch, kCodes ? KvDType::kInt8 : KvDType::kSameAsQuery,
                       kPrecision, kAddsStreams)
          : 1;
  static constexpr bool kStashes = kBlock.Stashes();  // attends two streams in turn
  // The same bytes in flight for codes.
  static constexpr int kStages = kSingleBuffers ? kBuffers : 2 * kStepMmas;

  // Whether the last block of a work tile combines its partial results. With more rows, one block
  // would take longer than another launch.
  static constexpr bool kCombines = kSmallSpans && !kCascades;

  // Accumulator tiles (kMmaRows x kMmaColumns) of a warp, for each of its row tiles.
  static constexpr int kScoreTiles = kTileTokens / kMmaColumns;
  static constexpr int kOutputTiles = kHeadDim / kMmaColumns;
  // Sums of probabilities go by token % 8, so that a row has the same bits in all blocks for small
  // spans: if a lane has two, even tokens and odd tokens have a sum each.
  static constexpr bool kTwoSums = kCodes && kSmallSpans && !kTransposed;
  // Otherwise O needs the registers, and every K tile reads Q from shared memory again.
  static constexpr bool kQueryInRegisters = !kCodeValues && kHeadDim <= (kRowTiles == 1     ? 128
                                                                         : kQueryParts == 1 ? 64
                                                                                            : 32);
  // Where a group is a warp, a barrier costs little. V of the first tile is asked for before Q has
  // been read, so Q is in no stage.
  static constexpr bool kCopiesEarly = kSingleBuffers && kGroupThreads == 32;
  // Whether the output leaves so few registers that places are computed again for each tile.
  static constexpr bool kFewRegisters = kSingleBuffers && kHeadDim > 64;
  // And so few that the work tile is copied to shared memory, where its address is a constant. And
  // so that two of these blocks have room on an SM of sm_89, Q starts at 0, its codes take the
  // first half of it, and then V the last quarter, before K.
  static constexpr bool kPacksQuery = kCodeValues && kFewRegisters && kRowTiles == 2;
  // Pipelined main loop: two tiles of scores in registers. It pays up to head_dim 64, where
  // exponentials take as long as multiplications, and only if the registers suffice.
  // They do not if the scales of V must wait for P, too.
  static constexpr bool kPipelined = kHeadDim <= 64 && !kSingleBuffers && !kCodes;
  // Unrolled steps of Q K^T: as many as the registers allow. Each step beyond saves two
  // instructions of a loop, and reads Q and K ahead.
  static constexpr int kScoreUnroll =
      kQueryInRegisters || kHeadDim == 96 || kHeadDim == 256 ? kSteps : 4 / kStepMmas;

  static constexpr int kTileBytes = kTileTokens * kKvRowBytes;
  static constexpr int kScaleBytes = kCodes ? 2 * kTileTokens * 2 : 0;  // of K, then of V
  static constexpr int kGroupBytes = 2 * kTileBytes + kScaleBytes;      // of a stage
  // With kCodes: K or V of a KV head in a page.
  static constexpr int kHeadPageBytes = kPageTokens * (kKvRowBytes + 2);
  static constexpr int kStageStride = kWarpGroups * kGroupBytes;
  static constexpr int kQueryBytes = kRows * kQueryRowBytes;
  static constexpr bool kQueryInStages =
      kQueryInRegisters && !kCopiesEarly &&
      kQueryBytes <= (kSingleBuffers ? kTileBytes : kStageStride);
  static constexpr int kQueryOperandBytes = kPacksQuery ? kQueryRowBytes / 2 : kQueryRowBytes;
  static constexpr int kStagesOffset = kPacksQuery ? kQueryBytes - kTileBytes : 0;
  static constexpr int kQueryOffset =
      kPacksQuery ? 0 : (kQueryInStages ? kStages - 1 : kStages) * kStageStride;
  static constexpr int kVisibleOffset =
      kStagesOffset + kStages * kStageStride + (kQueryInStages || kPacksQuery ? 0 : kQueryBytes);
  static constexpr int kQueryFactorOffset = kVisibleOffset + kRows * 8;
  static constexpr int kTableOffset = kQueryFactorOffset + (kQueryParts > 0 ? kRows * 4 : 0);
  static constexpr int kTableBytes = kCodes ? 12 * kTileTokens : 0;  // of a warp group
  static constexpr int kMainloopBytes = kTableOffset + kWarpGroups * kTableBytes;

  // Each warp group finishes a slice of kSliceTiles output tiles of every row, for which the other
  // groups store kReduceTiles tiles: with two groups only the other's slice, with more all tiles.
  static constexpr int kSliceTiles = kOutputTiles / kWarpGroups;
  static constexpr int kSliceColumns = kSliceTiles * kMmaColumns;
  static constexpr int kReduceTiles = kWarpGroups == 1   ? 0
                                      : kWarpGroups == 2 ? kSliceTiles
                                                         : kOutputTiles;
  static constexpr int kStatBytes = kWarpGroups == 1 ? 0 : 16 * kRowTiles * kThreads;
  // Row tiles whose output tiles are in shared memory at a time.
  static constexpr int kReduceRowTiles = kCascades ? 1 : kRowTiles;
  static constexpr int kStagingOffset = kStatBytes + 16 * kReduceRowTiles * kThreads * kReduceTiles;
  static constexpr int kStagingPitch = kSliceColumns * 2 + (kSliceColumns % 16 == 0 ? 16 : 0);
  // Cascade items write partial results only.
  static constexpr int kStagingBytes = kCascades ? 0 : kWarpGroups * kRows * kStagingPitch;
  static constexpr int kEpilogueBytes = kStagingOffset + kStagingBytes;

  static constexpr int kStashOffset =
      kMainloopBytes > kEpilogueBytes ? kMainloopBytes : kEpilogueBytes;
  static constexpr int kStashBytes = kStashes ? 16 * kRowTiles * (kOutputTiles + 1) * kThreads : 0;
  static constexpr int kWorkTileOffset = kStashOffset + kStashBytes;
  static constexpr int kSharedBytes =
      kWorkTileOffset + (kPacksQuery ? static_cast<int>(sizeof(WorkTile)) : 0);

  static_assert(kHeadDim % 32 == 0 && kHeadDim <= 256);
  static_assert(std::is_same_v<KvElement, Element> || kCodes);
  static_assert(!kCodes || (std::is_same_v<Accum, float> && kScaleBytes % 128 == 0));
  static_assert(kKvRowBytes % 64 == 0 && kSliceColumns % (8 * kStepMmas) == 0);
  static_assert(!kTransposed || (kCodes && kRowTiles == 1 && kWarpGroups > 2));
  static_assert(kRowWarps * kWarpRows == kRows);
  static_assert(kPageTokens % kTileTokens == 0 && kTileTokens % (kCodeValues ? 32 : 16) == 0);
  static_assert(!kCodeValues || kQueryParts == 1);
  static_assert(!kFloatValueSums || kStreams == 1);
  static_assert(!kPacksQuery ||
                (kBuffers == 1 && kWarpGroups == 1 && kStagesOffset >= kRows * kQueryOperandBytes));
  static_assert(kStreams == kWarpGroups || (kStreams == 2 && kWarpGroups == 1 && kSingleBuffers));
  static_assert((kStreams & (kStreams - 1)) == 0 && kOutputTiles % kWarpGroups == 0);
  static_assert(!kRuns || kSingleBuffers);
  static_assert(!kRuns || kWarpGroups == (kAddsStreams ? kSmallRunSplits : 1));
  static_assert(kSharedBytes <= 99 * 1024, "limit of a block on sm_89");
};

// The block's KV head. Each call reads it again: it need not stay in a register between two.
__device__ __forceinline__ int KvHead() {
  uint32_t kv_head;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(kv_head));
  return static_cast<int>(kv_head);
}

// The thread's number in the block. With kFewRegisters, each call reads it again: whatever follows
// from it need not stay in registers between two of them.
template <class C>
__device__ __forceinline__ int ThreadIndex() {
  if constexpr (!C::kFewRegisters) return threadIdx.x;
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  if constexpr (C::kCodes) __builtin_assume(thread < C::kThreads);  // saves what a sign takes
  return static_cast<int>(thread);
}

// The calling thread's place in the block.
template <class C>
struct ThreadPosition {
  __device__ __forceinline__ ThreadPosition() {
    const auto thread = static_cast<uint32_t>(ThreadIndex<C>());
    lane = thread % 32;
    row_warp = thread / 32 % C::kRowWarps;
    warp_group = C::kWarpGroups == 1 ? 0 : thread / 32 / C::kRowWarps;
  }

  // The work tile's row that is this lane's row i (0 or 1) of row tile m.
  __device__ __forceinline__ int Row(int m, int i) const {
    return row_warp * C::kWarpRows + m * C::kMmaRows + FirstRow() + C::kRowStep * i;
  }
  // The same for row tile 0 and i = 0, in the warp's rows; the second is kRowStep further.
  __device__ __forceinline__ int FirstRow() const {
    return C::kTransposed ? lane % 4 * 2 : lane / 4;
  }
  // Whether the lane is the first of those that share its rows.
  __device__ __forceinline__ bool IsFirstOfRows() const {
    return (C::kTransposed ? lane / 4 : lane % 4) == 0;
  }

  // The first of this lane's two tokens of score tile 0; the second is kTokenStep further.
  __device__ __forceinline__ int FirstToken() const {
    return C::kTransposed ? lane / 4 : lane % 4 * 2;
  }

  // The first of this lane's two columns of output tile n (operands.cuh).
  __device__ __forceinline__ int Column(int n) const {
    if constexpr (C::kTransposed) return 16 * n + lane / 4 * 2;
    return C::kCodes ? 16 * (n / 2) + lane % 4 * 4 + 2 * (n % 2) : 8 * n + lane % 4 * 2;
  }

  int lane;
  int row_warp;
  int warp_group;
};

// A lane's four accumulators of an mma are of two packed rows. Accumulator j (0 or 1) of its row i,
// and the row of accumulator c:
template <class C>
__device__ __forceinline__ constexpr int AccumulatorAt(int i, int j) {
  return C::kTransposed ? 2 * j + i : 2 * i + j;
}
template <class C>
__device__ __forceinline__ constexpr int RowOfAccumulator(int c) {
  return C::kTransposed ? c % 2 : c / 2;
}

// Barrier for the threads of one KV warp group.
template <class C>
__device__ __forceinline__ void SyncWarpGroup() {
  if constexpr (C::kWarpGroups == 1) {
    __syncthreads();
  } else if constexpr (C::kGroupThreads == 32) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(ThreadPosition<C>().warp_group + 1), "n"(C::kGroupThreads)
                 : "memory");
  }
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_CONFIG_CUH_
