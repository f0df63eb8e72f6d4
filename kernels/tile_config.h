// How each kernel family tiles its work: pure constexpr functions, each choice with its reason.
#ifndef FLASHCORE_KERNELS_TILE_CONFIG_H_
#define FLASHCORE_KERNELS_TILE_CONFIG_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <tuple>

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

// Packed rows of the largest cascade item of a CUDA kernel.
inline constexpr int32_t kCudaCascadeRows = 64;

// Shared memory of a device's SMs.
enum class SharedSize : uint8_t {
  kLarge,  // 164 KB or more, kLargeSharedBytes or more of it for a block: sm_80, sm_90
  kSmall,  // 100 KB, 99 KB of it for a block: sm_86, sm_89
};
inline constexpr size_t kLargeSharedBytes = 163 * 1024;

constexpr PlanOptions Sm80Plan(int32_t head_dim, SharedSize shared = SharedSize::kLarge) {
  PlanOptions plan;
  // Warps of 32 rows read K and V from shared memory half as often as warps of 16, and those reads
  // are the limit of warps of 16. Above head_dim 128 the output of 32 rows needs all registers, and
  // at 128 two blocks of them need more shared memory than is always there. On an H100 with tensor
  // cores slowed to an L4's rate, two blocks of 64 rows are 18% faster than one of 128, and than
  // one of 128 with warps of 16 rows by 3%.
  plan.tile_rows = head_dim <= (shared == SharedSize::kLarge ? 128 : 96) ? 128 : 64;
  plan.halves_tiles = true;
  // 64 KB of K: a decode of 8 KV heads over 4096 rows of 128 becomes 128 blocks. Half as many split
  // rows cost 6% of the bandwidth of a large decode, twice as many 8% of the time of a single one.
  plan.split_kv_rows = head_dim <= 64 ? 512 : 256;
  plan.split_max_rows = std::numeric_limits<int32_t>::max();
  // Blocks of the largest tile that run on an SM at a time.
  plan.items_per_worker = 2;
  // With fewer rows, reading K and V takes as long as splits that are written and combined. Up to
  // head_dim 64, a block of the largest tile already adds two streams.
  plan.has_runs = head_dim > 64;
  // A decode of many sequences takes 3 to 8% less time in runs: it has a quarter of the partial
  // results, and waits for the first K and for the last sum of a block a quarter as often. At 256
  // there are no registers for the sums.
  plan.has_small_runs = head_dim <= 128;
  // Two launches more, and splits that do not combine themselves: on an H100, sharing a prefix of
  // 1,024 rows costs 4 us at 190 rows of 128 saved on an SM, and gains as much at 930.
  plan.cascade_rows = kCudaCascadeRows;
  plan.cascade_saving = 512 * 128;
  plan.item_per_kv_head = false;
  return plan;
}

// With E4M3 K/V, which needs more registers for its conversion to float16: at head_dim 128, tiles
// of 128 rows do not fit in 255.
constexpr PlanOptions Sm80Fp8Plan(int32_t head_dim, SharedSize shared = SharedSize::kLarge) {
  PlanOptions plan = Sm80Plan(head_dim <= 64 ? head_dim : 256, shared);
  plan.has_runs = false;  // there are no kernels for those of large tiles
  plan.has_small_runs = head_dim <= 128;
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

  constexpr bool operator==(const Sm80Block& other) const {
    const auto fields = [](const Sm80Block& b) {
      return std::tie(b.row_tiles, b.row_warps, b.streams, b.warp_groups, b.tile_tokens,
                      b.min_blocks, b.single_buffers);
    };
    return fields(*this) == fields(other);
  }
};

// Blocks of 32, 64 and 128 rows have the same streams and tile_tokens, so a row gets the same bits
// in any of them: see PlanOptions::halves_tiles.
constexpr Sm80Block Sm80BlockFor(int32_t tile_rows, int32_t head_dim,
                                 SharedSize shared = SharedSize::kLarge) {
  Sm80Block block;
  block.row_tiles = tile_rows == 128 || (tile_rows == 64 && head_dim <= 64) ? 2 : 1;
  block.row_warps = tile_rows / (16 * block.row_tiles);
  if (tile_rows == 16) {
    // Decode is bound by memory: keep as many bytes in flight as shared memory holds, and several
    // blocks on an SM, to overlap what a block does before and after its main loop. Each warp is a
    // group of its own, so no warp waits for another in the main loop. Buffers of 32 K/V rows (64
    // up to head_dim 64) take 1% less time than two stages of half as many, and 3 to 20% less than
    // buffers of half as many.
    block.streams = block.warp_groups = head_dim <= 128 ? kSmallRunSplits : 2;
    block.tile_tokens = head_dim <= 64 ? 64 : 32;
    block.single_buffers = true;
    if (head_dim <= 128) block.min_blocks = 3;
  } else {
    // Two streams up to head_dim 64, where a softmax takes as long as the multiplications that run
    // beside it. Each has a warp group while tiles are few. Beyond, multiplications take nearly all
    // the time, and two blocks of 4 warps on an SM, which are never in step, are faster than two
    // groups (by 12% at 128). So they are where tiles are many: a block attends both streams in
    // turn, if two have room for what they keep of the first.
    const bool is_largest = tile_rows == Sm80Plan(head_dim, shared).tile_rows;
    const bool is_large = shared == SharedSize::kLarge;
    block.streams = head_dim <= 64 ? 2 : 1;
    block.warp_groups = is_largest && is_large ? 1 : block.streams;
    block.tile_tokens = 64;  // at 256, half as many take 3 to 28% longer
    // Enough other warps hide the wait for a copy, and without stages to choose at run time a tile
    // takes a third fewer instructions beside its multiplications. In launches of few small tiles,
    // copies two tiles ahead are faster, unless they take the shared memory of a second block, or
    // more than a block has.
    block.single_buffers = tile_rows > 32 || head_dim > (is_large ? 128 : 64);
    if (tile_rows > 32 && block.warp_groups == 1) block.min_blocks = 2;
    if (tile_rows == 32 && head_dim <= 64) block.min_blocks = 2;
  }
  return block;
}

// The block of a cascade item: the streams and tiles of spans of 16 rows, so that a row gets the
// bits that it has alone, with warps for more rows. It is bound by memory as long as it reads K/V
// slower than it multiplies.
constexpr Sm80Block Sm80CascadeBlock(int32_t head_dim) {
  Sm80Block block = Sm80BlockFor(kCudaTileRows[0], head_dim);
  block.row_tiles = head_dim <= 128 ? 2 : 1;
  block.row_warps = kCudaCascadeRows / (16 * block.row_tiles);
  block.min_blocks = 1;
  return block;
}

// kLarge if the block for `shared` is the same: one kernel is both.
constexpr SharedSize Sm80BlockOf(int32_t tile_rows, int32_t head_dim, SharedSize shared) {
  const bool is_same = Sm80BlockFor(tile_rows, head_dim, shared) ==
                       Sm80BlockFor(tile_rows, head_dim, SharedSize::kLarge);
  return is_same ? SharedSize::kLarge : shared;
}

namespace internal {
constexpr bool IsSane(const PlanOptions& plan, int32_t max_rows) {
  return plan.tile_rows <= max_rows && plan.cascade_rows <= plan.tile_rows &&
         kLeastTileRows <= plan.tile_rows && plan.split_kv_rows % kPageTokens == 0;
}
}  // namespace internal
static_assert(internal::IsSane(CpuPlan(), kCpuMaxTileRows));
// A span that is split must read K/V in place, because items shared between spans do.
static_assert(CpuPlan().split_max_rows <= kCpuFewRows);
// A row has the bits of its span alone in the blocks of one size only.
static_assert(kSmallSpanRows == kCudaTileRows[0]);
static_assert(internal::IsSane(Sm80Plan(64), kCudaMaxTileRows));
static_assert(internal::IsSane(Sm80Plan(128), kCudaMaxTileRows));
static_assert(internal::IsSane(Sm80Plan(128, SharedSize::kSmall), kCudaMaxTileRows));
static_assert(internal::IsSane(Sm80Plan(256), kCudaMaxTileRows));

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_TILE_CONFIG_H_
