// How each kernel family tiles its work: pure constexpr functions, each choice with its reason.
#ifndef FLASHCORE_KERNELS_TILE_CONFIG_H_
#define FLASHCORE_KERNELS_TILE_CONFIG_H_

#include <cstdint>
#include <limits>

#include "kernels/attention.h"
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

// Packed rows of the tiles that CUDA kernels are compiled for. A work item runs in the smallest
// that holds its rows. The first is only for spans that have no more rows than that.
inline constexpr int32_t kCudaTileRows[] = {16, 32, 64, 128};
inline constexpr int kCudaTileKinds = 4;
inline constexpr int32_t kCudaMaxTileRows = kCudaTileRows[kCudaTileKinds - 1];

constexpr PlanOptions Sm80Plan(int32_t head_dim) {
  PlanOptions plan;
  // Warps of 32 rows read K and V from shared memory half as often as warps of 16, and those reads
  // are the limit of warps of 16. Above head_dim 128 the output of 32 rows needs all registers.
  plan.tile_rows = head_dim <= 128 ? 128 : 64;
  // 8 heads of 512 rows are 128 blocks.
  plan.min_tile_rows = 32;
  // 64 KB of K: a decode of 8 KV heads over 4096 rows of 128 becomes 128 blocks. Half as many split
  // rows cost 6% of the bandwidth of a large decode, twice as many 8% of the time of a single one.
  plan.split_kv_rows = head_dim <= 64 ? 512 : 256;
  plan.split_max_rows = std::numeric_limits<int32_t>::max();
  // Blocks of the largest tile that run on an SM at a time.
  plan.items_per_worker = 2;
  // With fewer rows, reading K and V takes as long as splits that are written and combined. Up to
  // head_dim 64, a block of the largest tile already adds two streams.
  plan.has_runs = head_dim > 64;
  plan.item_per_kv_head = false;
  return plan;
}

// With E4M3 K/V, which needs more registers for its conversion to float16: at head_dim 128, tiles
// of 128 rows do not fit in 255.
constexpr PlanOptions Sm80Fp8Plan(int32_t head_dim) {
  PlanOptions plan = Sm80Plan(head_dim <= 64 ? head_dim : 256);
  plan.has_runs = false;  // its largest tile has no block with single buffers
  return plan;
}

// The thread block of an sm80 kernel: a grid of warp_groups x row_warps warps (sm80/config.cuh).
struct Sm80Block {
  int row_tiles = 1;    // of 16 packed rows, per warp
  int row_warps = 1;    // warps that divide the packed rows
  int streams = 1;      // that K/V tiles are dealt to in turn, each with its own online softmax
  int warp_groups = 1;  // KV warp groups: one for each stream, or one for all
  int tile_tokens = 0;  // K/V rows of a tile
  int min_blocks = 1;   // blocks on an SM that the registers must allow
  // One K and one V buffer, each copied while the other is used, instead of stages.
  bool single_buffers = false;

  // Whether its warps attend two streams in turn, and stash the first.
  constexpr bool Stashes() const { return streams > warp_groups; }
  constexpr bool MayHaveRuns() const { return single_buffers && streams == 1; }
};

// What a block is for, beside its rows.
enum class BlockUse {
  kSplit,        // one split of a tile or all of it
  kRun,          // runs of splits, too
  kSmallShared,  // as kSplit, on devices whose blocks have less than kLargeSharedBytes
};

// Shared memory that a block can have: this or more on sm_80 and sm_90, 99 KB on sm_86 and sm_89.
inline constexpr int32_t kLargeSharedBytes = 163 * 1024;

// Blocks of 32, 64 and 128 rows have the same streams and tile_tokens, so a row gets the same bits
// in any of them: see PlanOptions::min_tile_rows.
constexpr Sm80Block Sm80BlockFor(int32_t tile_rows, int32_t head_dim,
                                 BlockUse use = BlockUse::kSplit) {
  Sm80Block block;
  block.row_tiles = tile_rows == 128 || (tile_rows == 64 && head_dim <= 64) ? 2 : 1;
  block.row_warps = tile_rows / (16 * block.row_tiles);
  if (tile_rows == 16) {
    // Decode is bound by memory: keep as many bytes in flight as shared memory holds, and several
    // blocks on an SM, to overlap what a block does before and after its main loop. Each warp is a
    // group of its own, so no warp waits for another in the main loop.
    block.streams = block.warp_groups = head_dim <= 128 ? 4 : 2;
    block.tile_tokens = head_dim <= 32 ? 64 : head_dim <= 64 ? 32 : 16;
    if (head_dim > 64 && head_dim <= 128) block.min_blocks = 3;
  } else {
    // Two streams up to head_dim 64, where a softmax takes as long as the multiplications that run
    // beside it. Each has a warp group while tiles are few. Beyond, multiplications take nearly all
    // the time, and two blocks of 4 warps on an SM, which are never in step, are faster than two
    // groups (by 12% at 128). So they are where tiles are many: a block attends both streams in
    // turn, if two have room for what they keep of the first.
    const bool is_largest = tile_rows == Sm80Plan(head_dim).tile_rows;
    block.streams = head_dim <= 64 ? 2 : 1;
    block.warp_groups = is_largest && use != BlockUse::kSmallShared ? 1 : block.streams;
    block.tile_tokens = head_dim <= 128 ? 64 : 32;
    // Enough other warps hide the wait for a copy, and without stages to choose at run time a tile
    // takes a third fewer instructions beside its multiplications. In launches of few small tiles,
    // copies two tiles ahead are faster.
    block.single_buffers = is_largest || block.row_tiles == 2;
    if (is_largest && block.warp_groups == 1) block.min_blocks = 2;
    if (tile_rows == 32 && head_dim <= 64) block.min_blocks = 2;
  }
  return block;
}

// The use of the block for a launch, given the one for BlockUse::kSplit, whether the launch has
// runs, and the shared memory that a block can have.
constexpr BlockUse Sm80UseFor(const Sm80Block& split, bool has_runs, int32_t block_shared_bytes) {
  if (has_runs && split.MayHaveRuns()) return BlockUse::kRun;
  const bool is_small = block_shared_bytes < kLargeSharedBytes;
  return is_small && split.Stashes() ? BlockUse::kSmallShared : BlockUse::kSplit;
}

namespace internal {
constexpr bool IsSane(const PlanOptions& plan, int32_t max_rows) {
  return plan.tile_rows <= max_rows && plan.cascade_rows <= plan.tile_rows &&
         plan.min_tile_rows <= plan.tile_rows && plan.split_kv_rows % kPageTokens == 0;
}
}  // namespace internal
static_assert(internal::IsSane(CpuPlan(), kCpuMaxTileRows));
// A span that is split must read K/V in place, because items shared between spans do.
static_assert(CpuPlan().split_max_rows <= kCpuFewRows);
static_assert(internal::IsSane(Sm80Plan(64), kCudaMaxTileRows));
static_assert(internal::IsSane(Sm80Plan(128), kCudaMaxTileRows));
static_assert(internal::IsSane(Sm80Plan(256), kCudaMaxTileRows));

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_TILE_CONFIG_H_
