// Turns a batch into a work list: which tiles, how many KV splits, in which order. Pure host
// arithmetic, so it is tested without a device.
//
// Packed rows: the query rows of the query heads that share a KV head. Packed row r of (span,
// kv_head) is query row r / group of query head kv_head * group + r % group. A tile is up to
// PlanOptions::tile_rows packed rows. A work item attends one tile to a range of K/V rows.
//
// A span with few packed rows (decode) has one tile per KV head, and its K/V range is split. For
// 2 query rows, group 2 and split_kv_rows 512, a KV head has three items and one combine:
//
//   packed row      K/V row 0       512           1024       1300
//                           +--------+-------------+----------+
//   0: query row 0, head 0  |        |             |          |
//   1: query row 0, head 1  |  item  |    item     |   item   |
//   2: query row 1, head 0  |        |             |          |
//   3: query row 1, head 1  |        |             |          |
//                           +--------+-------------+----------+
//   partial rows            p .. p+3   p+4 .. p+7   p+8 .. p+11   -> CombineItem -> O, LSE
//
// A span with more packed rows has several tiles, each with its own splits. An item of a tile
// without splits writes O and LSE itself.
//
// Runs: in a batch that fills the device anyway, one item attends the splits of a run and adds up
// their partial results, as the combine would. A run has 8 splits, or 4 in a span of up to 16
// packed rows:
//
//   K/V row 0       512      1024     1536            4096     4608     5000
//           | split | split  | split  | ...   | split | split  | split  |
//           |              run of 8 splits            | run of 2 splits |
//
// Cascade: spans whose leading pages are the same (a shared prefix) share items, so that the K/V of
// the prefix is read once. Only whole splits are shared, by spans of equal splits, packed rows and
// scales:
//
//             split 0        split 1        split 2
//   span A  [ pages 4..11 ][ pages 12..19 ][ own pages ]
//   span B  [ pages 4..11 ][ pages 12..19 ][ own pages ]
//             one item       one item       two items
//
// Output bits do not depend on the other spans of a batch: a span's splits follow from that span
// alone (its query and K/V rows, mask, heads and head_dim) and from the device (SplitRows). So does
// its tile, except where the kernel gives a row the same bits in every allowed tile
// (PlanOptions::halves_tiles). A cascade item leaves the partial rows of each span as they are
// without it, and a run the sums. Other spans change only the order of the items, their tiles,
// which spans' rows an item serves, and whether it is a split or a run. A plan of some slices of a
// span (Span::slices) has the items that the plan of the whole span has for them.
#ifndef FLASHCORE_KERNELS_PLAN_H_
#define FLASHCORE_KERNELS_PLAN_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/attention.h"
#include "kernels/plan_options.h"

namespace flashcore::kernels {

// Packed rows [row_begin, row_begin + row_count) of one KV head of one span, and the K/V rows
// [kv_begin, kv_end) they attend to. The range is narrowed to what the mask leaves visible to at
// least one of them; kv_begin is rounded down to a multiple of kPageTokens. An empty range is
// legal: it writes O = 0 and LSE = -infinity.
//
// In a cascade item, row_count is the sum over its spans, row_begin is 0, `span` is any of its
// spans (all have the same K/V in the range), and the range is one split, visible to every row.
// partial_row and combine are those of its first span.
struct WorkItem {
  int32_t span = 0;
  int32_t kv_head = 0;
  int32_t row_begin = 0;
  int32_t row_count = 0;
  int32_t kv_begin = 0;
  int32_t kv_end = 0;
  int32_t split_rows = 0;          // K/V rows of each of its splits; the last may have fewer
  int32_t partial_row = -1;        // first row of its partial results; -1: its tile is not split
  int32_t combine = -1;            // index in Plan::combines; -1: writes O and LSE
  int32_t first_cascade_span = 0;  // index in Plan::cascade_spans
  int32_t num_cascade_spans = 0;   // 0: not a cascade item; else at least 2
  int32_t tile_rows = 0;           // of the span's largest tile

  bool IsRun() const { return kv_end - kv_begin > split_rows; }
  bool IsCascade() const { return num_cascade_spans > 0; }
  int32_t CascadeSplit() const { return kv_begin / split_rows; }  // only of a cascade item
};

// The packed rows of one span in the cascade items of some of its splits: all rows that the span
// has for the KV head. The spans of an item have equally many.
struct CascadeSpan {
  // First partial row of a split; -1: the span is one split.
  int32_t PartialRow(int32_t split) const {
    return combine < 0 ? -1 : first_partial_row + split * row_count;
  }

  int32_t span = 0;
  int32_t tile_row = 0;  // its first row in the item; the spans' rows follow each other
  int32_t row_count = 0;
  int32_t first_partial_row = -1;  // of split 0
  int32_t combine = -1;            // as in WorkItem
};

// Merges the partial results of the items of one tile, in the order of their K/V rows. Packed row r
// of item n is partial row first_partial_row + n * row_count + r.
struct CombineItem {
  int32_t span = 0;
  int32_t kv_head = 0;
  int32_t row_begin = 0;
  int32_t row_count = 0;
  int32_t first_partial_row = 0;
  int32_t num_parts = 0;     // items, at least 2
  int32_t run_parts = 1;     // items of each run but the last: its splits, or 1 for all
  int32_t tile_rows = 0;     // as in WorkItem
  bool has_cascade = false;  // whether some of the items, the first among them, are cascade items
};

struct Plan {
  std::vector<WorkItem> items;  // longest first
  // Those of one item are contiguous. Items of the same spans have them in common.
  std::vector<CascadeSpan> cascade_spans;
  std::vector<CombineItem> combines;
  int32_t partial_rows = 0;               // over all splits
  size_t workspace_bytes = 0;             // a partial row is head_dim + 2 floats (O, max, sum)
  const PlanCosts* costs = &kEqualCosts;  // as in PlanOptions

  // Scratch of MakePlan, kept for its memory.
  struct Scratch {
    std::vector<WorkItem> items;
    std::vector<std::pair<int64_t, size_t>> order;
    // For each span:
    std::vector<int32_t> split_rows;
    std::vector<size_t> first_item;
    std::vector<bool> shares;  // in cascade items
  };
  Scratch scratch = {};
};

// The partial rows of a plan in its workspace of rows * (head_dim + 2) floats: first all outputs,
// then all maxima, then all sums. A split writes them, the combine reads them.
struct Partials {
  Partials(float* workspace, int32_t rows, int32_t output_head_dim)
      : output(workspace),
        max(workspace + int64_t{rows} * output_head_dim),
        sum(max + rows),
        head_dim(output_head_dim) {}

  float* OutputRow(int32_t row) const { return output + int64_t{row} * head_dim; }

  float* output;  // [rows][head_dim], not normalised, relative to 2^max
  float* max;     // [rows], base 2; -infinity if no K/V row of the split is visible to the row
  float* sum;     // [rows]
  int32_t head_dim;
};

// Plans `batch` into `*plan`, whose memory is reused. `workers` is how many items the device runs
// at a time (CPU: threads), at least 1. Reads page tables, unless options.cascade_rows is 0, but no
// tensor.
void MakePlan(const AttentionBatch& batch, const PlanOptions& options, int32_t workers, Plan* plan);

// K/V rows of each split of a span; the last of a tile may have fewer. kUnsplit: the span has none.
// `workers` is that of MakePlan, and only counts if options.items_per_worker does. Splits are as
// short as the span needs to keep all workers busy if it is alone, and smaller tiles would not, but
// not so short that writing and combining partial results takes much of the time of a batch that
// fills the device without splits. The more packed rows read a K/V row, the longer is the shortest
// split. A span that may use runs may have splits half that long, if that is at least
// PlanCosts::half_split_gain times as fast alone.
int32_t SplitRows(const Geometry& geometry, const Span& span, const PlanOptions& options,
                  int32_t workers);
inline constexpr int32_t kUnsplit = std::numeric_limits<int32_t>::max();

// K/V rows [begin, end); empty if begin == end.
struct KvRange {
  int32_t begin = 0;
  int32_t end = 0;
};

// The K/V rows that are visible to at least one of the query rows [row_begin, row_end) of a span.
// In the header, since plans call it for every tile.
inline KvRange VisibleKv(const Mask& mask, int32_t query_rows, int32_t kv_rows, int32_t row_begin,
                         int32_t row_end) {
  if (row_begin >= row_end) return {};
  const int64_t offset = int64_t{kv_rows} - query_rows;
  const int64_t first = row_begin + offset;   // position of the first row
  const int64_t last = row_end - 1 + offset;  // position of the last row
  int64_t begin = 0;
  int64_t end = kv_rows;
  if (mask.left != Mask::kUnbounded) begin = std::max(begin, first - mask.left);
  if (mask.right != Mask::kUnbounded) end = std::min(end, last + mask.right + 1);
  if (begin >= end) return {};
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_PLAN_H_
