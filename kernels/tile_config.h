// How each kernel family tiles its work: one constexpr row per choice, each with its reason.
#ifndef FLASHCORE_KERNELS_TILE_CONFIG_H_
#define FLASHCORE_KERNELS_TILE_CONFIG_H_

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/plan.h"

namespace flashcore::kernels {

// The tile of one kernel family for head dims up to `max_head_dim`. Rows of a family are in
// ascending order of max_head_dim; the first that fits is used.
struct TileRow {
  int32_t max_head_dim;
  PlanOptions plan;
};

inline constexpr int32_t kCpuMaxHeadDim = 256;
inline constexpr int32_t kCpuMaxTileRows = 128;  // sizes the scratch of a CPU thread
inline constexpr int32_t kCpuFewRows = 16;       // work items of at most so many read K/V in place

inline constexpr TileRow kCpuTiles[] = {
    // 128 packed rows: converting and transposing a K/V tile is paid once per 128 rows (about 2% of
    // the multiplications), and what is in use at a time (the float32 query, output and score tiles
    // and one K and one V tile: 128 KB at head_dim 64, 224 KB at 128, 416 KB at 256) stays in the
    // L2 of a core. Measured slower: 96 rows by 2%, 126 (a multiple of the register block) by 1%;
    // at head_dim 256, 64 rows by 2%.
    // Splits of 512 K/V rows: a decode over 4096 rows becomes 8 items per KV head, enough for tens
    // of threads, and a split still streams 128 KB or more, so merging it costs under 1%.
    // Up to 16 packed rows split: such a span has one row tile per KV head, so without splits a
    // small batch could not use every core; with more rows it is bound by arithmetic.
    // Cascade items of up to 64 packed rows: reading and converting K/V once for 64 rows instead of
    // 128 costs less than the noise (32 rows: 5%), and more items are easier to spread over cores.
    {256, {128, 512, 16, 64}},
};

// Packed rows of the tiles that CUDA kernels are compiled for. A work item runs with the smallest
// that holds its rows; the first is for spans that have no more rows than that.
inline constexpr int32_t kCudaTileRows[] = {16, 32, 64, 128};
inline constexpr int kCudaTileKinds = 4;
inline constexpr int32_t kCudaMaxTileRows = kCudaTileRows[kCudaTileKinds - 1];

inline constexpr TileRow kSm80Tiles[] = {
    // 128 packed rows: warps of 32 rows read K and V from shared memory half as often as warps of
    // 16, which is what bounds those. Down to 32 rows while there are fewer blocks than three in
    // four SMs: 8 heads of 512 rows then are 128 blocks.
    // Splits of 64 KB of K: a decode of 8 KV heads over 4096 rows of 128 becomes 128 blocks. Half
    // as many split rows cost 6% of the bandwidth of a large decode, twice as many 8% of the time
    // of a single one. Up to 64 packed rows split: more have two tiles or more per KV head.
    {64, {128, 512, 64, 0, 32, false}},
    {128, {128, 256, 64, 0, 32, false}},
    // The output of 32 rows of 256 components is all registers there are.
    {256, {64, 256, 64, 0, 32, false}},
};

// The thread block of an sm80 kernel: teams * row_warps warps. The warps of a team share the tile's
// packed rows, 16 * row_tiles each. The teams take turns in the K/V tiles, of tile_tokens each; a
// team has room for `stages` pairs of a K and a V tile in shared memory.
struct Sm80Block {
  int row_tiles;
  int row_warps;
  int teams;
  int tile_tokens;
  int stages;
  int min_blocks = 1;  // on an SM, that the registers must allow
};

// A row gets the same bits from blocks that differ in rows, warps and stages only, so blocks of 32,
// 64 and 128 rows have the same teams and tile_tokens: see PlanOptions::min_tile_rows.
constexpr Sm80Block Sm80BlockFor(int32_t tile_rows, int32_t head_dim) {
  if (tile_rows == 16) {
    // Decode: bound by memory, so as many bytes on their way as shared memory holds, and for what
    // a block waits for before and after its loop, more blocks than one. Each warp is a team, which
    // never waits for another in its loop.
    if (head_dim <= 32) return {1, 1, 4, 64, 2};
    if (head_dim <= 64) return {1, 1, 4, 32, 2};
    if (head_dim <= 128) return {1, 1, 4, 16, 2, 3};
    return {1, 1, 2, 16, 2};
  }
  // Two teams up to head_dim 64, where the softmax takes as long as the multiplications that run
  // beside it. Beyond, one: their time is nearly all multiplications, and two blocks of 4 warps on
  // an SM, which are never in step, are faster than two teams (by 12% at 128).
  if (tile_rows == 32) {
    if (head_dim <= 64) return {1, 2, 2, 64, 2, 2};
    if (head_dim <= 128) return {1, 2, 1, 64, 2};
    return {1, 2, 1, 32, 2};
  }
  if (tile_rows == 64) {
    if (head_dim <= 64) return {1, 4, 2, 64, 2};
    if (head_dim <= 128) return {1, 4, 1, 64, 2};
    return {1, 4, 1, 32, 2};
  }
  if (head_dim <= 64) return {2, 4, 2, 64, 2};
  return {2, 4, 1, 64, 2};
}

// The row of `tiles` for head_dim, which must not exceed the last row's.
template <int kRows>
constexpr const TileRow& TileFor(const TileRow (&tiles)[kRows], int32_t head_dim) {
  int row = 0;
  while (row + 1 < kRows && tiles[row].max_head_dim < head_dim) ++row;
  return tiles[row];
}

// With E4M3 K/V, whose float16 operands take more registers: at head_dim 128 not even 255 would do
// for tiles of 128 rows.
inline constexpr TileRow kSm80Fp8Tiles[] = {
    {64, TileFor(kSm80Tiles, 64).plan},
    {128, TileFor(kSm80Tiles, 256).plan},
};

namespace internal {
template <int kRows>
constexpr bool TilesAreSane(const TileRow (&tiles)[kRows], int32_t max_rows,
                            int32_t max_split_rows) {
  for (int i = 0; i < kRows; ++i) {
    if (i > 0 && tiles[i].max_head_dim <= tiles[i - 1].max_head_dim) return false;
    if (tiles[i].plan.tile_rows > max_rows) return false;
    if (tiles[i].plan.split_max_rows > max_split_rows) return false;
    if (tiles[i].plan.split_max_rows > tiles[i].plan.tile_rows) return false;
    if (tiles[i].plan.cascade_rows > tiles[i].plan.tile_rows) return false;
    if (tiles[i].plan.min_tile_rows > tiles[i].plan.tile_rows) return false;
    if (tiles[i].plan.split_kv_rows % kPageTokens != 0) return false;
  }
  return true;
}
constexpr bool BlocksAgree() {
  for (int32_t head_dim = 32; head_dim <= 256; head_dim += 32) {
    const Sm80Block small = Sm80BlockFor(32, head_dim);
    for (int32_t tile_rows : {64, 128}) {
      const Sm80Block block = Sm80BlockFor(tile_rows, head_dim);
      if (head_dim > 128 && tile_rows > 64) continue;  // not compiled
      if (block.teams != small.teams || block.tile_tokens != small.tile_tokens) return false;
    }
  }
  return true;
}
}  // namespace internal
// Split spans must read K/V in place, because cascade items sum in that order.
static_assert(internal::TilesAreSane(kCpuTiles, kCpuMaxTileRows, kCpuFewRows));
static_assert(internal::TilesAreSane(kSm80Tiles, kCudaMaxTileRows, kCudaMaxTileRows));
static_assert(internal::TilesAreSane(kSm80Fp8Tiles, kCudaMaxTileRows, kCudaMaxTileRows));
static_assert(internal::BlocksAgree());

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_TILE_CONFIG_H_
