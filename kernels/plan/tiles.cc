#include "kernels/plan/tiles.h"

#include <limits>

namespace flashcore::kernels {
namespace {

// Whether the span's slices have KV head `head` of a tile that begins at `row_begin`.
bool HasSlice(const AttentionBatch& batch, const PlanOptions& options, const Span& span,
              int32_t row_begin, int32_t head) {
  // Without items per KV head, the first head speaks for all.
  const int32_t counted = options.item_per_kv_head ? head : 0;
  return span.slices.Contains(int64_t{row_begin / options.tile_rows} * batch.geometry.num_kv_heads +
                              counted);
}

}  // namespace

int32_t TileRows(const AttentionBatch& batch, const PlanOptions& options, int32_t workers,
                 const std::vector<int32_t>& split_rows, bool split) {
  int32_t best = options.tile_rows;
  if (!options.halves_tiles) return best;
  double least_time = std::numeric_limits<double>::infinity();
  const auto& kinds = options.costs->tiles;
  for (int kind = options.costs->KindOf(options.tile_rows); kind > 0; --kind) {
    const int32_t rows = kinds[kind].rows;
    double all = 0, longest = 0;
    int longest_kind = 0;
    bool can_halve = false;
    for (int32_t s = 0; s < batch.num_spans; ++s) {
      const Span& span = batch.spans[s];
      const int32_t span_rows = span.query_rows * batch.geometry.group();
      if ((split_rows[s] != kUnsplit) != split || span_rows == 0) continue;
      const int block = BlockKind(options, rows, span_rows);
      can_halve |= block > 1;
      // Spans without splits count as equally long.
      const double row_time = BlockTime(kinds[block]);
      const double time = row_time * (split ? split_rows[s] : 1);
      all += row_time * (split ? span.kv.rows : 1) * DivideUp(span_rows, rows) *
             batch.geometry.num_kv_heads;
      if (time > longest) {
        longest = time;
        longest_kind = block;
      }
    }
    if (rows == options.tile_rows && !can_halve) return best;
    const double time = TimeOfBlocks(all / longest, kinds[longest_kind], longest, options, workers);
    if (time < least_time) {
      least_time = time;
      best = rows;
    }
  }
  return best;
}

std::pair<int32_t, int32_t> RowsToPlan(const AttentionBatch& batch, const PlanOptions& options,
                                       const Span& span) {
  const int64_t heads = batch.geometry.num_kv_heads;
  const int64_t rows = int64_t{span.query_rows} * batch.geometry.group();
  const int64_t tiles = (rows + options.tile_rows - 1) / options.tile_rows;
  const int64_t begin = std::min(span.slices.begin / heads, tiles);
  const int64_t end =
      span.slices.end > tiles * heads ? tiles : (span.slices.end + heads - 1) / heads;
  return {static_cast<int32_t>(begin * options.tile_rows),
          static_cast<int32_t>(std::min(rows, end * options.tile_rows))};
}

void PlanTile(const AttentionBatch& batch, const PlanOptions& options, const Tile& tile,
              Plan* plan) {
  const auto& [span_index, tile_rows, split_rows, row_begin, row_count, has_runs] = tile;
  const Span& span = batch.spans[span_index];
  const KvRange kv = KvOfTile(span, batch.geometry.group(), row_begin, row_count);
  const int32_t splits = DivideUp(kv.end - kv.begin, split_rows);
  const int32_t run_splits = RunSplits(span.query_rows * batch.geometry.group());
  const int32_t item_splits = has_runs ? run_splits : 1;
  const int32_t parts = std::max(1, DivideUp(splits, item_splits));

  // Written in place: a copy of what was just written in parts waits for it.
  for (int32_t head = 0; head < batch.geometry.num_kv_heads; ++head) {
    if (!HasSlice(batch, options, span, row_begin, head)) continue;
    int32_t partial_row = splits > 1 ? plan->partial_rows : -1;
    const int32_t combine_index = parts > 1 ? static_cast<int32_t>(plan->combines.size()) : -1;
    if (parts > 1) {
      CombineItem& combine = plan->combines.emplace_back();
      combine.span = span_index;
      combine.kv_head = head;
      combine.row_begin = row_begin;
      combine.row_count = row_count;
      combine.first_partial_row = partial_row;
      combine.num_parts = parts;
      combine.run_parts = run_splits / item_splits;
      combine.tile_rows = tile_rows;
    }
    if (splits > 1) plan->partial_rows += parts * row_count;
    if (head > 0 && !options.item_per_kv_head) continue;
    int32_t kv_begin = kv.begin;
    for (int32_t part = 0; part < parts; ++part) {
      WorkItem& item = plan->items.emplace_back();
      item.span = span_index;
      item.kv_head = head;
      item.row_begin = row_begin;
      item.row_count = row_count;
      item.kv_begin = kv_begin;
      // Not beyond the end, which the largest integer is close to.
      const int64_t item_rows = int64_t{split_rows} * item_splits;
      item.kv_end = static_cast<int32_t>(std::min<int64_t>(kv.end, kv_begin + item_rows));
      item.split_rows = split_rows;
      item.partial_row = partial_row;
      item.combine = combine_index;
      item.tile_rows = tile_rows;
      kv_begin = item.kv_end;
      partial_row += row_count;
    }
  }
}

}  // namespace flashcore::kernels
