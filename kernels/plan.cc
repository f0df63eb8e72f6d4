#include "kernels/plan.h"

#include <algorithm>
#include <tuple>

#include "kernels/plan/cascade.h"
#include "kernels/plan/runs.h"
#include "kernels/plan/tiles.h"

namespace flashcore::kernels {
namespace {

// Work of an item, in packed rows * K/V rows. K/V rows count one more, so that of two items without
// K/V the one with more rows is longer.
int64_t Cost(const PlanOptions& options, const WorkItem& item) {
  const bool has_block = !options.item_per_kv_head && !item.IsCascade();
  const int32_t rows =
      has_block ? BlockRows(options, options.tile_rows, item.tile_rows) : item.row_count;
  return int64_t{rows} * (int64_t{item.kv_end} - item.kv_begin + 1);
}

bool IsBeforeInBatch(const WorkItem& a, const WorkItem& b) {
  return std::tie(a.span, a.kv_head, a.row_begin, a.kv_begin) <
         std::tie(b.span, b.kv_head, b.row_begin, b.kv_begin);
}

// Longest first, so that the last items to start are the shortest. Ties go by place in the batch,
// which makes the order a pure function of the batch.
//
// Items are planned in the order of their places, unless a span has several tiles of several KV
// heads. In a decode, nearly all are whole splits of the same length: only the others are sorted.
void SortItems(const PlanOptions& options, Plan* plan) {
  if (!std::is_sorted(plan->items.begin(), plan->items.end(), IsBeforeInBatch)) {
    std::sort(plan->items.begin(), plan->items.end(), [&](const WorkItem& a, const WorkItem& b) {
      const int64_t cost_a = Cost(options, a), cost_b = Cost(options, b);
      return cost_a != cost_b ? cost_a > cost_b : IsBeforeInBatch(a, b);
    });
    return;
  }
  std::vector<WorkItem>& planned = plan->scratch.items;
  planned.swap(plan->items);
  plan->items.clear();
  int64_t longest = 0;
  for (const WorkItem& item : planned) longest = std::max(longest, Cost(options, item));
  auto& shorter = plan->scratch.order;  // the negative cost, and the place in `planned`
  shorter.clear();
  for (size_t i = 0; i < planned.size(); ++i) {
    const int64_t cost = Cost(options, planned[i]);
    if (cost == longest) {
      plan->items.push_back(planned[i]);
    } else {
      shorter.emplace_back(-cost, i);
    }
  }
  std::sort(shorter.begin(), shorter.end());
  for (const auto& [cost, i] : shorter) plan->items.push_back(planned[i]);
}

}  // namespace

void MakePlan(const AttentionBatch& batch, const PlanOptions& options, int32_t workers,
              Plan* plan) {
  plan->items.clear();
  plan->cascade_spans.clear();
  plan->combines.clear();
  plan->partial_rows = 0;
  plan->costs = options.costs;
  Plan::Scratch& scratch = plan->scratch;
  const std::vector<int32_t>& split_rows = scratch.split_rows;
  scratch.split_rows.clear();
  scratch.first_item.clear();
  for (int32_t s = 0; s < batch.num_spans; ++s) {
    scratch.split_rows.push_back(SplitRows(batch.geometry, batch.spans[s], options, workers));
  }
  CascadeCandidates candidates = FindCommonPrefixes(batch, options, workers, &scratch);
  RunBudget runs(batch, options, workers, scratch, /*small=*/false);
  RunBudget small_runs(batch, options, workers, scratch, /*small=*/true);
  const int32_t unsplit_tile_rows = TileRows(batch, options, workers, split_rows, false);
  const int32_t split_tile_rows =
      runs.Any() ? options.tile_rows : TileRows(batch, options, workers, split_rows, true);
  for (int32_t s = 0; s < batch.num_spans; ++s) {
    scratch.first_item.push_back(plan->items.size());
    const Span& span = batch.spans[s];
    const int32_t rows = span.query_rows * batch.geometry.group();
    const bool split = split_rows[s] != kUnsplit;
    int32_t tile_rows = options.tile_rows;
    if (MayHalve(span, options, split)) tile_rows = split ? split_tile_rows : unsplit_tile_rows;
    const auto [row_begin, row_end] = RowsToPlan(batch, options, span);
    for (int32_t row = row_begin; row < row_end; row += tile_rows) {
      const int32_t row_count = std::min(tile_rows, rows - row);
      Tile tile{s, std::min(tile_rows, rows), split_rows[s], row, row_count};
      tile.has_runs = runs.Take(span, tile) || small_runs.Take(span, tile);
      PlanTile(batch, options, tile, plan);
    }
  }
  ShareCommonPrefixes(batch, options, workers, &candidates, plan);
  SortItems(options, plan);
  plan->workspace_bytes =
      size_t{sizeof(float)} * plan->partial_rows * (batch.geometry.head_dim + 2);
}

}  // namespace flashcore::kernels
