#include "kernels/plan.h"

#include <algorithm>

#include "kernels/plan_forks.h"

namespace flashcore::kernels {
namespace {

int32_t DivideUp(int32_t a, int32_t b) { return a / b + (a % b != 0); }

// Plans one tile of packed rows of every KV head of a span.
void PlanTile(const AttentionBatch& batch, const PlanOptions& options, int32_t span_index,
              int32_t row_begin, int32_t row_count, bool may_split, Plan* plan) {
  const Span& span = batch.spans[span_index];
  const int32_t group = batch.geometry.group();
  const KvRange seen = VisibleKv(span.mask, span.query_rows, span.kv.rows, row_begin / group,
                                 (row_begin + row_count - 1) / group + 1);
  const int32_t begin = seen.begin / kPageTokens * kPageTokens;
  const int32_t splits =
      may_split ? std::max(1, DivideUp(seen.end - begin, options.split_kv_rows)) : 1;

  for (int32_t head = 0; head < batch.geometry.num_kv_heads; ++head) {
    const bool has_items = head == 0 || options.kv_heads_apart;
    WorkItem item{span_index, head, row_begin, row_count, begin, seen.end, -1};
    if (splits == 1) {
      if (has_items) plan->items.push_back(item);
      continue;
    }
    item.combine = static_cast<int32_t>(plan->combines.size());
    plan->combines.push_back({span_index, head, row_begin, row_count, plan->partial_rows, splits});
    for (int32_t split = 0; has_items && split < splits; ++split) {
      item.kv_begin = begin + split * options.split_kv_rows;
      item.kv_end = std::min(seen.end, item.kv_begin + options.split_kv_rows);
      item.partial_row = plan->partial_rows + split * row_count;
      plan->items.push_back(item);
    }
    plan->partial_rows += splits * row_count;
  }
}

// Packed rows of the tiles of spans that do not split.
int32_t TileRows(const AttentionBatch& batch, const PlanOptions& options, int32_t workers) {
  int32_t tile_rows = options.tile_rows;
  if (options.min_tile_rows == 0) return tile_rows;
  for (; tile_rows > options.min_tile_rows; tile_rows /= 2) {
    int64_t tiles = 0;
    for (int32_t s = 0; s < batch.num_spans; ++s) {
      const int32_t rows = batch.spans[s].query_rows * batch.geometry.group();
      if (rows > options.split_max_rows) tiles += DivideUp(rows, tile_rows);
    }
    // Workers without an item cost less than smaller tiles while they are few.
    if (tiles * batch.geometry.num_kv_heads * 4 >= int64_t{workers} * 3) break;
  }
  return tile_rows;
}

// Work of an item in row * K/V row units. One is added to the K/V rows so that among items without
// K/V the larger one still counts for more.
int64_t Cost(const WorkItem& item) {
  return int64_t{item.row_count} * (int64_t{item.kv_end} - item.kv_begin + 1);
}

// Longest first, so that the last items to start are the shortest; ties by position in the batch,
// which makes the order, and with it the plan, a pure function of the batch.
bool RunsBefore(const WorkItem& a, const WorkItem& b) {
  if (Cost(a) != Cost(b)) return Cost(a) > Cost(b);
  if (a.span != b.span) return a.span < b.span;
  if (a.kv_head != b.kv_head) return a.kv_head < b.kv_head;
  if (a.row_begin != b.row_begin) return a.row_begin < b.row_begin;
  return a.kv_begin < b.kv_begin;
}

}  // namespace

KvRange VisibleKv(const Mask& mask, int32_t query_rows, int32_t kv_rows, int32_t row_begin,
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

void MakePlan(const AttentionBatch& batch, const PlanOptions& options, int32_t workers,
              Plan* plan) {
  plan->items.clear();
  plan->members.clear();
  plan->combines.clear();
  plan->partial_rows = 0;
  const int32_t many_rows = TileRows(batch, options, workers);
  std::vector<Fork> forks;
  for (int32_t s = 0; s < batch.num_spans; ++s) {
    const size_t first_item = plan->items.size();
    const int32_t rows = batch.spans[s].query_rows * batch.geometry.group();
    const bool may_split = rows <= options.split_max_rows;
    const int32_t tile_rows = may_split ? options.tile_rows : many_rows;
    for (int32_t row = 0; row < rows; row += tile_rows) {
      PlanTile(batch, options, s, row, std::min(tile_rows, rows - row), may_split, plan);
    }
    if (may_split && options.shared_rows > 0) AddFork(batch, options, *plan, first_item, &forks);
  }
  ShareItems(batch.geometry, options, workers, &forks, plan);
  std::sort(plan->items.begin(), plan->items.end(), RunsBefore);
  plan->workspace_bytes =
      size_t{sizeof(float)} * plan->partial_rows * (batch.geometry.head_dim + 2);
}

}  // namespace flashcore::kernels
