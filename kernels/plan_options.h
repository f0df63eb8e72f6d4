// Kernels' requirements on their plans.
#ifndef FLASHCORE_KERNELS_PLAN_OPTIONS_H_
#define FLASHCORE_KERNELS_PLAN_OPTIONS_H_

#include <array>
#include <cstdint>

#include "kernels/attention.h"

namespace flashcore::kernels {

// Packed rows of the largest small span. Reading K/V is what takes its time, so only small spans
// share items.
inline constexpr int32_t kSmallSpanRows = 16;

// Packed rows of the largest span of those that kernels over 8-bit K/V have blocks of their own
// for.
inline constexpr int32_t kSmallestSpanRows = 8;

// Splits of a run. CUDA kernels add the partial results of a tile run by run, with runs or without.
inline constexpr int32_t kRunSplits = 8;
inline constexpr int32_t kSmallRunSplits = 4;  // of small spans
constexpr int32_t RunSplits(int32_t span_rows) {
  return span_rows <= kSmallSpanRows ? kSmallRunSplits : kRunSplits;
}

// Kinds of tiles that a kernel family has blocks for, by packed rows.
inline constexpr int kTileKinds = 4;

// A kind of tile, and the block that attends one.
struct TileKind {
  int32_t rows = 0;  // packed rows, at most
  // Time of a block per packed row, where all places of the workers run one; relative to the last
  // kind.
  double row_time = 1;
  // Time of a block that has a worker for itself, relative to one where all places run one.
  double alone_time = 1;
  // The shortest split of spans of so many packed rows, in PlanOptions::split_kv_rows. The more
  // packed rows read a K/V row, the more partial results a split has. The last kind is for all
  // larger spans, too.
  int32_t split_units = 1;
};

// Measured on the blocks of a kernel family. Tiles, splits and runs follow from it, so
// another value changes output bits. A family has its own, for all its kernels.
struct PlanCosts {
  // The first kind that holds so many packed rows, or else the last.
  constexpr int KindOf(int32_t rows) const {
    int kind = 0;
    while (kind + 1 < kTileKinds && tiles[kind].rows < rows) ++kind;
    return kind;
  }

  // Ascending, each twice as large as the one before. The first is for small spans only, and no
  // tile is halved to it.
  std::array<TileKind, kTileKinds> tiles = {{{kSmallSpanRows}, {32}, {64}, {128}}};
  // Time of writing and combining the partial results of a split: of reading so many K/V rows, as a
  // fraction of the shortest split of the span.
  double results = 0.25;
  // The fraction of it that is left in a run.
  double results_in_run = 1;
  // A span that may have runs has splits half as long as the shortest where it is so many times as
  // fast with them, alone.
  double half_split_gain = 1;
  // Splits of spans that are not small have a multiple of so many K/V rows.
  int32_t split_unit = kPageTokens;
};

// For a family that states none: all blocks take equally long for each row.
inline constexpr PlanCosts kEqualCosts;

// A kernel's requirements on its plan. Constant per kernel, independent of the batch.
struct PlanOptions {
  int32_t tile_rows = 128;      // largest tile, packed rows
  int32_t split_kv_rows = 512;  // K/V rows of the shortest split; a multiple of kPageTokens
  int32_t split_max_rows = 16;  // a span with more packed rows per KV head is not split
  // Largest cascade item, packed rows; 0: no cascade. Small spans take part.
  int32_t cascade_rows = 0;
  // Tiles are halved, down to PlanCosts::tiles[1], while that lets all workers share the work
  // better. Only for kernels that give a row the same bits in all of these tiles. A span with a
  // left window that is split keeps its tiles: its splits are counted from the first K/V row that a
  // tile sees.
  bool halves_tiles = false;
  // false: items exist for KV head 0 only, and the kernel runs each of them for every KV head, in a
  // block for the span's largest tile: it takes as long if the item has fewer rows. Combines and
  // partial rows exist for every KV head.
  bool item_per_kv_head = true;
  // Items that run at a time on a worker, in its places. Splits become longer than the shortest
  // where a span alone keeps all workers busy with them. 0: all splits are the shortest, on every
  // device.
  int32_t items_per_worker = 0;
  bool has_runs = false;        // spans of more than tile_rows / 2 packed rows may have runs
  bool has_small_runs = false;  // small spans may have runs
  // Runs that run at a time on a worker in a batch whose small spans have up to kSmallestSpanRows
  // packed rows; 0: items_per_worker.
  int32_t smallest_runs_per_worker = 0;
  // Items are shared if that saves so many elements of K (rows * head_dim) per worker, at least.
  int64_t cascade_saving = 0;
  const PlanCosts* costs = &kEqualCosts;  // of the family; static

  // The smallest tile that a large span may have.
  constexpr int32_t least_tile_rows() const {
    return halves_tiles ? costs->tiles[1].rows : tile_rows;
  }
};

// Whether kernels for tiles of up to `max_rows` packed rows can have such plans.
constexpr bool IsSane(const PlanOptions& options, int32_t max_rows) {
  return options.tile_rows <= max_rows && options.cascade_rows <= options.tile_rows &&
         options.least_tile_rows() <= options.tile_rows &&
         options.split_kv_rows % kPageTokens == 0 &&
         options.costs->tiles[options.costs->KindOf(options.tile_rows)].rows == options.tile_rows;
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_PLAN_OPTIONS_H_
