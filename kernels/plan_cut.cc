#include "kernels/plan_cut.h"

#include <algorithm>
#include <cmath>

namespace flashcore::kernels {
namespace {

// Slices that a part has together or not at all: one, or all of a run of tiles.
struct Unit {
  CutPoint end;
  int64_t items = 0;  // that can run at a time
  double flop = 0;
};

// While a launch has fewer items than this for each worker, it should have as many for all.
constexpr int64_t kManyItems = 8;

// One slice, of the packed rows [row_begin, row_end).
Unit SliceOf(const AttentionBatch& batch, const Span& span, int32_t split_rows, int64_t row_begin,
             int64_t row_end, const CutOptions& cut) {
  const int32_t group = batch.geometry.group();
  const KvRange visible = VisibleKv(span.terms.mask, span.query_rows, span.kv.rows,
                                    static_cast<int32_t>(row_begin / group),
                                    static_cast<int32_t>((row_end - 1) / group) + 1);
  const int32_t kv_rows = visible.end - visible.begin;
  const double rows = std::max(static_cast<double>(row_end - row_begin), cut.min_rows);
  return {
      {}, std::max(1, kv_rows / split_rows), 4.0 * rows * (kv_rows + 1) * batch.geometry.head_dim};
}

// Calls visit(unit) for every unit of the batch, in order.
template <class Visit>
void ForEachUnit(const AttentionBatch& batch, const PlanOptions& options, int32_t workers,
                 const CutOptions& cut, const Visit& visit) {
  const int32_t heads = batch.geometry.num_kv_heads;
  const int32_t group = batch.geometry.group();
  for (int32_t s = 0; s < batch.num_spans; ++s) {
    const Span& span = batch.spans[s];
    const int64_t rows = int64_t{span.query_rows} * group;
    const int32_t split_rows = SplitRows(batch.geometry, span, options, workers);
    Unit unit;
    for (int64_t row = 0, slice = 0; row < rows; row += options.tile_rows) {
      const int64_t row_end = std::min(rows, row + options.tile_rows);
      const Unit one = SliceOf(batch, span, split_rows, row, row_end, cut);
      for (int32_t head = 0; head < heads; ++head) {
        ++slice;
        unit.items += one.items;
        unit.flop += one.flop;
        const bool whole_rows = head == heads - 1 && (row_end == rows || row_end % group == 0);
        if (!options.item_per_kv_head && !whole_rows) continue;
        const bool ends_span = row_end == rows && head == heads - 1;
        unit.end = ends_span ? CutPoint{s + 1, 0} : CutPoint{s, slice};
        visit(unit);
        unit = {};
      }
    }
  }
}

}  // namespace

SliceRange BatchPart::SlicesOf(int32_t span) const {
  SliceRange range;
  if (span < begin.span || span > end.span) return {0, 0};
  if (span == begin.span) range.begin = begin.slice;
  if (span == end.span) range.end = end.slice;
  return range;
}

std::vector<BatchPart> CutBatch(const AttentionBatch& batch, const PlanOptions& options,
                                int32_t workers, const CutOptions& cut) {
  Unit all;
  ForEachUnit(batch, options, workers, cut, [&](const Unit& unit) {
    all.items += unit.items;
    all.flop += unit.flop;
  });
  const double target = all.flop / std::max(1.0, std::ceil(all.flop / cut.max_flop));

  std::vector<BatchPart> parts(1);
  Unit part;  // the last one so far
  ForEachUnit(batch, options, workers, cut, [&](const Unit& unit) {
    part.items += unit.items;
    part.flop += unit.flop;
    all.items -= unit.items;
    const bool balanced = part.items % workers == 0 || part.items >= kManyItems * workers;
    if (part.flop < target || !balanced || all.items == 0) return;
    parts.back().end = unit.end;
    parts.push_back({unit.end, BatchPart().end});
    part = {};
  });
  return parts;
}

RowRange QueryRowsOf(const Geometry& geometry, const PlanOptions& options, const Span& span) {
  const int32_t group = geometry.group();
  const int64_t rows = int64_t{span.query_rows} * group;
  const int64_t slices = (rows + options.tile_rows - 1) / options.tile_rows * geometry.num_kv_heads;
  const auto row_of = [&](int64_t slice) {
    const int64_t tile = std::min(slice, slices) / geometry.num_kv_heads;
    return static_cast<int32_t>(std::min(rows, tile * options.tile_rows) / group);
  };
  return {row_of(span.slices.begin), std::max(row_of(span.slices.begin), row_of(span.slices.end))};
}

}  // namespace flashcore::kernels
