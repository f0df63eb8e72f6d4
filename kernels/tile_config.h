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
    // Shared items of up to 64 packed rows: reading and converting K/V once for 64 rows instead of
    // 128 costs less than the noise (32 rows: 5%), and more items are easier to spread over cores.
    {256, {128, 512, 16, 64}},
};

// Packed rows of the tiles that CUDA kernels are compiled for; a work item runs with the smallest
// that holds its rows.
inline constexpr int32_t kCudaTileRows[] = {16, 32, 64};
inline constexpr int kCudaTileKinds = 3;
inline constexpr int32_t kCudaMaxTileRows = kCudaTileRows[kCudaTileKinds - 1];

inline constexpr TileRow kSm80Tiles[] = {
    // 64 packed rows: 4 warps of 16 rows keep O of head_dim 256 in registers, and two blocks fit
    // the shared memory of an sm_89 SM up to head_dim 128.
    // Splits of 256 K/V rows: a decode over 4096 rows becomes 16 items per KV head, and writing and
    // reading the partial results of 4 query heads adds 3% to the bytes of K/V. Up to 64 packed
    // rows split: such a span has at most two row tiles per KV head.
    // Spans of up to 512 packed rows are cut into tiles of 32: 8 heads of 512 rows then are 128
    // blocks: nearly one for each of an H200's 132 SMs, a little over two for each of an L4's 58.
    {256, {64, 256, 64, 0, 32, 512}},
};

// The thread block of an sm80 kernel: row_warps * token_warps warps share a tile of 16 * row_warps
// packed rows and kPageTokens tokens; a warp has 16 rows and kPageTokens / token_warps tokens.
struct Sm80Block {
  int row_warps;
  int token_warps;
  int stages;  // K/V tiles in shared memory at a time
};

// Always 4 warps. Few rows leave warps over to share the tokens, each with a softmax of its own,
// merged at the end. Two stages where two blocks still fit the 100 KB of an sm_89 SM. Few rows
// (decode) are bound by memory and have two at head_dim 96 and 128 too, in place of a second block.
constexpr Sm80Block Sm80BlockFor(int32_t tile_rows, int32_t head_dim) {
  const int row_warps = tile_rows / 16;
  const bool two_stages = head_dim <= 64 || (tile_rows == 16 && head_dim <= 128);
  return {row_warps, 4 / row_warps, two_stages ? 2 : 1};
}

// The row of `tiles` for head_dim, which must not exceed the last row's.
template <int kRows>
constexpr const TileRow& TileFor(const TileRow (&tiles)[kRows], int32_t head_dim) {
  int row = 0;
  while (row + 1 < kRows && tiles[row].max_head_dim < head_dim) ++row;
  return tiles[row];
}

namespace internal {
template <int kRows>
constexpr bool TilesAreSane(const TileRow (&tiles)[kRows], int32_t max_rows,
                            int32_t max_split_rows) {
  for (int i = 0; i < kRows; ++i) {
    if (i > 0 && tiles[i].max_head_dim <= tiles[i - 1].max_head_dim) return false;
    if (tiles[i].plan.tile_rows > max_rows) return false;
    if (tiles[i].plan.split_max_rows > max_split_rows) return false;
    if (tiles[i].plan.split_max_rows > tiles[i].plan.tile_rows) return false;
    if (tiles[i].plan.shared_rows > tiles[i].plan.tile_rows) return false;
    if (tiles[i].plan.small_tile_rows > tiles[i].plan.tile_rows) return false;
    if (tiles[i].plan.split_kv_rows % kPageTokens != 0) return false;
  }
  return true;
}
}  // namespace internal
// Spans that split alone must read K/V in place, because the items that they share do.
static_assert(internal::TilesAreSane(kCpuTiles, kCpuMaxTileRows, kCpuFewRows));
static_assert(internal::TilesAreSane(kSm80Tiles, kCudaMaxTileRows, kCudaMaxTileRows));

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_TILE_CONFIG_H_
