// The tiles of a plan: their rows, their blocks, and their items. Only for kernels/plan.
#ifndef FLASHCORE_KERNELS_PLAN_TILES_H_
#define FLASHCORE_KERNELS_PLAN_TILES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/attention.h"
#include "kernels/plan.h"

namespace flashcore::kernels {

inline int32_t DivideUp(int32_t a, int32_t b) {
  return a / b + (a % b != 0);  // NOLINT(clang-analyzer-core.DivideZero): b is a tile's rows
}

inline bool IsSmall(int32_t span_rows) { return span_rows <= kSmallSpanRows; }

// Items that run at a time on all workers.
inline int64_t Places(const PlanOptions& options, int32_t workers) {
  return int64_t{workers} * std::max(1, options.items_per_worker);
}

// KV heads that have items of their own.
inline int32_t PlannedHeads(const AttentionBatch& batch, const PlanOptions& options) {
  return options.item_per_kv_head ? batch.geometry.num_kv_heads : 1;
}

// The K/V rows that are visible to the packed rows [row_begin, row_begin + row_count), from the
// first row of a page.
inline KvRange KvOfTile(const Span& span, int32_t group, int32_t row_begin, int32_t row_count) {
  KvRange kv = VisibleKv(span.terms.mask, span.query_rows, span.kv.rows, row_begin / group,
                         (row_begin + row_count - 1) / group + 1);
  kv.begin = kv.begin / kPageTokens * kPageTokens;
  return kv;
}

// The kind of block that attends a span of span_rows in tiles of tile_rows. Never the first, which
// small spans alone have.
inline int BlockKind(const PlanOptions& options, int32_t tile_rows, int32_t span_rows) {
  return std::max(1, options.costs->KindOf(std::min(tile_rows, span_rows)));
}
inline int32_t BlockRows(const PlanOptions& options, int32_t tile_rows, int32_t span_rows) {
  return options.costs->tiles[BlockKind(options, tile_rows, span_rows)].rows;
}

// Time of a block of a kind where all places run one, relative to one packed row of the last kind.
inline double BlockTime(const TileKind& kind) { return kind.rows * kind.row_time; }

// Time of `blocks` blocks of a kind, each of which takes `time` where all places run one: rounds of
// all places. A block that has a worker for itself is faster.
inline double TimeOfBlocks(double blocks, const TileKind& kind, double time,
                           const PlanOptions& options, int32_t workers) {
  if (blocks > workers || options.items_per_worker < 2) {
    return std::ceil(blocks / static_cast<double>(Places(options, workers))) * time;
  }
  return time * kind.alone_time;
}

// Whether the span's rows have the same bits in halved tiles. The splits of a tile are counted from
// its first visible K/V row, which with a window depends on the tile.
inline bool MayHalve(const Span& span, const PlanOptions& options, bool split) {
  return options.halves_tiles && (!split || span.terms.mask.left == Mask::kUnbounded);
}

// Tile size for the spans that are split, or for those that are not: the one with which they are
// done first. Blocks are counted in those of the longest.
int32_t TileRows(const AttentionBatch& batch, const PlanOptions& options, int32_t workers,
                 const std::vector<int32_t>& split_rows, bool split);

// Packed rows [begin, end) of the tiles that have any of the span's slices.
std::pair<int32_t, int32_t> RowsToPlan(const AttentionBatch& batch, const PlanOptions& options,
                                       const Span& span);

// A tile of a span. Its splits have split_rows K/V rows.
struct Tile {
  int32_t span = 0;
  int32_t tile_rows = 0;  // as in WorkItem
  int32_t split_rows = 0;
  int32_t row_begin = 0;
  int32_t row_count = 0;
  bool has_runs = false;  // its items are runs, and not splits
};

// Plans a tile for the KV heads of its span, as far as they are in its slices.
void PlanTile(const AttentionBatch& batch, const PlanOptions& options, const Tile& tile,
              Plan* plan);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_PLAN_TILES_H_
