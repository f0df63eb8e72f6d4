// How the sm80 family tiles its work: pure constexpr functions, each choice with its reason.
#ifndef FLASHCORE_KERNELS_SM80_TILES_H_
#define FLASHCORE_KERNELS_SM80_TILES_H_

#include <cstdint>
#include <limits>
#include <tuple>

#include "kernels/attention.h"
#include "kernels/cuda/work_list.h"
#include "kernels/kernel.h"
#include "kernels/plan.h"

namespace flashcore::kernels::sm80 {

// A work item runs in the smallest tile that holds its rows. The first kind is only for spans that
// have no more rows than that: a row has the bits of its span alone in the blocks of one size only.
// (Over 8-bit K/V there is one more block for up to kSmallestSpanRows of them, with the same bits.)
//
// Measured on an H100. Fewer rows share a copy of K and V: 64 rows take 0.97 to 1.07 times as long
// for each row as here at head_dim 128 and 64, 32 rows 1.35 to 1.6. A block alone on an SM takes
// 0.57 of the time with 128 rows, 0.68 with 64 and 0.81 with 32.
inline constexpr PlanCosts kCosts = [] {
  PlanCosts costs;
  costs.tiles = {{{kSmallSpanRows, 1.5, 0.8, 1},
                  {32, 1.5, 0.8, 2},
                  {64, 8.0 / 7, 2.0 / 3, 2},
                  {128, 1, 0.6, 4}}};
  // 0.26 to 0.3 takes the faster of runs and splits, or one that is 1% slower, in all batches that
  // were measured but one.
  costs.results_in_run = 0.27;
  // In a batch that fills the SMs, adding the halves up in runs takes up to 18% more time.
  costs.half_split_gain = 1.2;
  // Two tiles: for as many in both phases of a block.
  costs.split_unit = 2 * kPageTokens;
  return costs;
}();
constexpr int32_t TileRows(int kind) { return kCosts.tiles[kind].rows; }
inline constexpr int32_t kMaxTileRows = TileRows(kTileKinds - 1);

// `arch` is kLargeShared or kSmallShared, here and below.
constexpr PlanOptions PlanFor(int32_t head_dim, Arch arch = Arch::kLargeShared,
                              KvDType kv_dtype = KvDType::kSameAsQuery,
                              Precision precision = Precision::k16Bit) {
  PlanOptions plan;
  plan.costs = &kCosts;
  // Warps of 32 rows read K and V from shared memory half as often as warps of 16, and those reads
  // are the limit of warps of 16. Above head_dim 128 the output of 32 rows needs all registers, and
  // at 128 two blocks of them need more shared memory than is always there. On an H100 with tensor
  // cores slowed to an L4's rate, two blocks of 64 rows are 18% faster than one of 128, and than
  // one of 128 with warps of 16 rows by 3%.
  plan.tile_rows = head_dim <= (arch == Arch::kLargeShared ? 128 : 96) ? 128 : 64;
  plan.halves_tiles = true;
  // 64 KB of K: a decode of 8 KV heads over 4096 rows of 128 becomes 128 blocks. Half as many split
  // rows cost 6% of the bandwidth of a large decode, twice as many 8% of the time of a single one.
  plan.split_kv_rows = head_dim <= 64 ? 512 : 256;
  plan.split_max_rows = std::numeric_limits<int32_t>::max();
  // Blocks of the largest tile that run on an SM at a time.
  plan.items_per_worker = 2;
  // With fewer rows, reading K and V takes as long as splits that are written and combined. Up to
  // head_dim 64, a block of the largest tile already adds two phases.
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
  if (Is8Bit(kv_dtype)) {
    // Products of 16 bits convert K and V, which needs registers: at head_dim 128, tiles of 128
    // rows do not fit in 255. There are no kernels for runs of large tiles.
    if (head_dim > 64 && precision == Precision::k16Bit) plan.tile_rows = 64;
    // Q of codes leaves room for two blocks (Config::kPacksQuery).
    if (precision == Precision::kInt8QkPv) plan.tile_rows = 128;
    plan.has_runs = false;
    // As many blocks as shared memory has room for (BuffersFor).
    if (arch == Arch::kLargeShared) plan.smallest_runs_per_worker = 3;
  }
  return plan;
}

// The thread block of an sm80 kernel: a grid of warp_groups x row_warps warps (config.cuh).
struct Block {
  int row_tiles = 1;    // of 16 packed rows, per warp
  int row_warps = 1;    // warps that divide the packed rows
  int phases = 1;       // that K/V tiles are dealt to in turn, each with its own online softmax
  int warp_groups = 1;  // KV warp groups: one for each phase, or one for all
  int tile_tokens = 0;  // K/V rows of a tile
  int min_blocks = 1;   // blocks on an SM that the registers must allow
  // One K and one V buffer, each copied while the other is used, instead of stages.
  bool single_buffers = false;

  // Whether its warps attend two phases in turn, and stash the first.
  constexpr bool Stashes() const { return phases > warp_groups; }

  constexpr bool operator==(const Block& other) const {
    const auto fields = [](const Block& b) {
      return std::tie(b.row_tiles, b.row_warps, b.phases, b.warp_groups, b.tile_tokens,
                      b.min_blocks, b.single_buffers);
    };
    return fields(*this) == fields(other);
  }
};

// Packed rows of the block for tiles of a kind, of which the largest has most_rows. The smallest
// spans over 8-bit K/V have a block of their own (Config::kTransposed).
constexpr int32_t KernelRows(int32_t kind_rows, int32_t most_rows, KvDType kv_dtype) {
  const bool is_smallest = kind_rows == kSmallSpanRows && most_rows <= kSmallestSpanRows;
  return Is8Bit(kv_dtype) && is_smallest ? kSmallestSpanRows : kind_rows;
}

// Blocks of 32, 64 and 128 rows have the same phases and tile_tokens, so a row gets the same bits
// in any of them: see PlanOptions::halves_tiles.
constexpr Block BlockFor(int32_t tile_rows, int32_t head_dim, Arch arch = Arch::kLargeShared) {
  Block block;
  block.row_tiles = tile_rows == 128 || (tile_rows == 64 && head_dim <= 64) ? 2 : 1;
  if (tile_rows <= kSmallSpanRows) {
    // Decode is bound by memory: keep as many bytes in flight as shared memory holds, and several
    // blocks on an SM, to overlap what a block does before and after its main loop. Each warp is a
    // group of its own, so no warp waits for another in the main loop. Buffers of 32 K/V rows (64
    // up to head_dim 64) take 1% less time than two stages of half as many, and 3 to 20% less than
    // buffers of half as many.
    block.phases = block.warp_groups = head_dim <= 128 ? kSmallRunSplits : 2;
    block.tile_tokens = head_dim <= 64 ? 64 : 32;
    block.single_buffers = true;
    if (head_dim <= 128) block.min_blocks = 3;
  } else {
    block.row_warps = tile_rows / (16 * block.row_tiles);
    // Two phases up to head_dim 64, where a softmax takes as long as the multiplications that run
    // beside it. Each has a warp group while tiles are few. Beyond, multiplications take nearly all
    // the time, and two blocks of 4 warps on an SM, which are never in step, are faster than two
    // groups (by 12% at 128). So they are where tiles are many: a block attends both phases in
    // turn, if two have room for what they keep of the first.
    const bool is_largest = tile_rows == PlanFor(head_dim, arch).tile_rows;
    const bool is_large = arch == Arch::kLargeShared;  // the shared memory
    block.phases = head_dim <= 64 ? 2 : 1;
    block.warp_groups = is_largest && is_large ? 1 : block.phases;
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

// The block of a cascade item: the phases and tiles of spans of 16 rows, so that a row gets the
// bits that it has alone, with warps for more rows. It is bound by memory as long as it reads K/V
// slower than it multiplies.
constexpr Block CascadeBlock(int32_t head_dim) {
  Block block = BlockFor(kSmallSpanRows, head_dim);
  block.row_tiles = head_dim <= 128 ? 2 : 1;
  block.row_warps = kCudaCascadeRows / (16 * block.row_tiles);
  block.min_blocks = 1;
  return block;
}

// Buffers each for K and for V of a block with single buffers. 8-bit K/V have half the bytes in
// flight and half the shared memory: on an H100, two of each take 3% less time for runs of small
// spans, 64 sequences of 4096 rows of 128, where two blocks fill the registers of an SM. Without
// runs, and so more blocks on an SM, they gain 2% or lose 2%. Products of codes take so little time
// that V would be waited for: 16 queries over 4096 rows take 17% less. In tiles of 128 rows they
// need the registers.
constexpr int BuffersFor(int32_t tile_rows, int32_t head_dim, Arch arch, KvDType kv_dtype,
                         Precision precision, bool small_runs) {
  const bool multiplies_fast =
      precision != Precision::k16Bit && (tile_rows == 32 || tile_rows == 64) && head_dim > 64;
  const bool pays = Is8Bit(kv_dtype) && (small_runs || multiplies_fast);
  return pays && arch == Arch::kLargeShared ? 2 : 1;
}

// kLargeShared if the block for `arch` is the same: one kernel is both. small_runs: a block for
// runs of small spans.
constexpr Arch BlockArch(int32_t tile_rows, int32_t head_dim, Arch arch, KvDType kv_dtype,
                         Precision precision, bool small_runs) {
  const auto buffers = [&](Arch of) {
    return BuffersFor(tile_rows, head_dim, of, kv_dtype, precision, small_runs);
  };
  const bool is_same = BlockFor(tile_rows, head_dim, arch) == BlockFor(tile_rows, head_dim) &&
                       buffers(arch) == buffers(Arch::kLargeShared);
  return is_same ? Arch::kLargeShared : arch;
}

constexpr PlanOptions PlanFor(const KernelSpec& spec) {
  return PlanFor(spec.head_dim, spec.arch, spec.kv_dtype, spec.precision);
}

// The block of a launch: of all tiles of a kind.
struct LaunchBlock {
  int32_t rows = 0;                // packed rows
  Arch arch = Arch::kLargeShared;  // of its kernel (BlockArch)
  Block block;
};

// most_rows: of the largest of the tiles.
constexpr LaunchBlock LaunchBlockFor(const KernelSpec& spec, int kind, int32_t most_rows,
                                     bool has_runs) {
  LaunchBlock launch;
  launch.rows = KernelRows(TileRows(kind), most_rows, spec.kv_dtype);
  launch.arch = BlockArch(launch.rows, spec.head_dim, spec.arch, spec.kv_dtype, spec.precision,
                          has_runs && kind == 0);
  launch.block = BlockFor(launch.rows, spec.head_dim, spec.arch);
  return launch;
}

static_assert(IsSane(PlanFor(64), kMaxTileRows));
static_assert(IsSane(PlanFor(128), kMaxTileRows));
static_assert(IsSane(PlanFor(128, Arch::kSmallShared), kMaxTileRows));
static_assert(IsSane(PlanFor(256), kMaxTileRows));

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_TILES_H_
