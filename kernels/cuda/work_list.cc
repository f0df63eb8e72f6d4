#include "kernels/cuda/work_list.h"

#include <algorithm>
#include <new>

namespace flashcore::kernels {
namespace {

// Partial outputs that one block combines in less time than a launch of its own takes. On an H100,
// the launch takes 1 us more for 8,192, as long for 32,768 and 45 us less for 262,144.
constexpr int64_t kMostToCombineInBlock = 32768;

// Whether the tile's partial results are combined by a launch of its own, and not by the last block
// to finish.
bool HasLaunch(const Geometry& geometry, const CombineItem& combine, const PlanCosts& costs) {
  if (combine.has_cascade || costs.KindOf(combine.tile_rows) > 0) return true;
  const int64_t rows = int64_t{combine.num_parts} * combine.row_count;
  return rows * geometry.head_dim > kMostToCombineInBlock;
}

// Whether the combine has a record: one of the tile, for every KV head.
bool HasRecord(const Geometry& geometry, const CombineItem& combine, const PlanCosts& costs) {
  return combine.kv_head == 0 && HasLaunch(geometry, combine, costs);
}

WorkSpan MakeSpan(int32_t group, const Span& from) {
  WorkSpan span = {};
  span.query = from.query;
  span.output = from.output;
  span.row_stride = from.row_stride;
  span.head_stride = from.head_stride;
  span.group_stride = group * from.head_stride;
  span.key = from.kv.key;
  span.value = from.kv.value;
  span.page_stride = from.kv.page_stride;
  span.kv_head_stride = from.kv.head_stride;
  span.kv_row_stride = from.kv.row_stride;
  span.lse = from.lse;
  span.lse_row_stride = from.lse_row_stride;
  span.lse_head_stride = from.lse_head_stride;
  span.position = from.kv.rows - from.query_rows;
  span.terms = from.terms;
  return span;
}

// Bytes of the spans and their page tables.
size_t HeadBytes(const AttentionBatch& batch) {
  size_t pages = 0;
  for (const Span* span = batch.spans; span != batch.spans + batch.num_spans; ++span) {
    if (span->kv.pages != nullptr) pages += PagesFor(span->kv.rows);
  }
  const size_t bytes = batch.num_spans * sizeof(WorkSpan) + pages * sizeof(int32_t);
  return (bytes + alignof(WorkTile) - 1) / alignof(WorkTile) * alignof(WorkTile);
}

// Sets where the partial results of the tile of a combine are.
void SetParts(const CombineItem& combine, WorkTile* tile) {
  tile->run_parts = static_cast<int16_t>(combine.run_parts);
  tile->num_parts = combine.num_parts;
  tile->first_partial_row = combine.first_partial_row;
}

// Written in place: a copy of what was just written in parts waits for it.
void MakeTile(const AttentionBatch& batch, const WorkItem& item, const Plan& plan, WorkTile* to) {
  const int32_t group = batch.geometry.group();
  const Span& span = batch.spans[item.span];
  WorkTile& tile = *new (to) WorkTile();
  tile.span = item.span;
  tile.row_begin = item.row_begin;
  tile.row_count = static_cast<int16_t>(item.row_count);
  tile.kv_begin = item.kv_begin;
  tile.kv_end = item.kv_end;
  tile.split_rows = std::min(item.split_rows, item.kv_end - item.kv_begin);
  if (item.IsCascade()) {
    tile.all_begin = item.kv_begin;
    tile.all_end = item.kv_end;
    tile.part = item.CascadeSplit();
    tile.num_members = item.num_cascade_spans;
    return;
  }
  // Visible ranges move right with the row: the first row's ends first, the last row's begins last.
  const int32_t first = item.row_begin / group;
  const int32_t last = (item.row_begin + item.row_count - 1) / group;
  const auto visible_to = [&span](int32_t row) {
    return VisibleKv(span.terms.mask, span.query_rows, span.kv.rows, row, row + 1);
  };
  const KvRange to_first = visible_to(first);
  const KvRange to_last = last == first ? to_first : visible_to(last);
  const bool none = to_first.begin == to_first.end || to_last.begin == to_last.end;
  tile.all_begin = none ? item.kv_end : to_last.begin;
  tile.all_end = none ? item.kv_end : std::min(to_first.end, item.kv_end);

  tile.run_parts = 1;
  tile.num_parts = 1;
  tile.first_partial_row = item.partial_row;
  if (item.combine < 0) return;
  const CombineItem& combine = plan.combines[item.combine];
  SetParts(combine, &tile);
  tile.part = (item.partial_row - combine.first_partial_row) / combine.row_count;
  tile.combine = HasLaunch(batch.geometry, combine, *plan.costs) ? -1 : item.combine;
}

// The combine kernel's record of a tile.
void MakeCombine(const CombineItem& combine, WorkTile* to) {
  WorkTile& tile = *new (to) WorkTile();
  tile.span = combine.span;
  tile.row_begin = combine.row_begin;
  tile.row_count = static_cast<int16_t>(combine.row_count);
  SetParts(combine, &tile);
}

// The kernel's record of one span of a cascade item.
void MakeMember(const Plan& plan, const CascadeSpan& span, WorkTile* to) {
  WorkTile& member = *new (to) WorkTile();
  member.span = span.span;
  member.row_count = static_cast<int16_t>(span.row_count);
  SetParts(plan.combines[span.combine], &member);
}

}  // namespace

RowDivider::RowDivider(int32_t by) : divisor(by), shift(0) {
  while ((int64_t{1} << shift) < by) ++shift;
  const uint64_t power = uint64_t{1} << (31 + shift);
  multiplier = static_cast<uint32_t>((power + by - 1) / by);
}

WorkListLayout::WorkListLayout(const AttentionBatch& batch, const Plan& plan)
    : head_bytes(HeadBytes(batch)) {
  for (const WorkItem& item : plan.items) {
    TileArray& array = item.IsCascade() ? cascades : kinds[plan.costs->KindOf(item.tile_rows)];
    ++array.count;
    array.most_rows = std::max(array.most_rows, item.row_count);
    array.has_runs |= !item.IsCascade() && item.IsRun();
  }
  cascades.members = static_cast<int32_t>(plan.cascade_spans.size());
  for (const CombineItem& combine : plan.combines) {
    if (!HasRecord(batch.geometry, combine, *plan.costs)) continue;
    ++combines.count;
    combines.most_rows = std::max(combines.most_rows, combine.row_count);
  }
  bytes = head_bytes;
  const auto place = [this](TileArray* array) {
    array->begin = bytes;
    bytes += (size_t{1} * array->count + array->members) * sizeof(WorkTile);
  };
  for (TileArray& kind : kinds) place(&kind);
  place(&combines);
  place(&cascades);
}

void PackWorkList(const AttentionBatch& batch, const Plan& plan, const WorkListLayout& layout,
                  std::byte* to) {
  const int32_t group = batch.geometry.group();
  auto* const spans = reinterpret_cast<WorkSpan*>(to);
  auto* next_page = reinterpret_cast<int32_t*>(spans + batch.num_spans);
  for (int32_t s = 0; s < batch.num_spans; ++s) {
    const KvView& kv = batch.spans[s].kv;
    WorkSpan& span = *new (spans + s) WorkSpan(MakeSpan(group, batch.spans[s]));
    if (kv.pages == nullptr) continue;
    span.first_page = static_cast<int32_t>(next_page - reinterpret_cast<int32_t*>(&span));
    next_page = std::copy_n(kv.pages, PagesFor(kv.rows), next_page);
  }
  std::array<WorkTile*, kTileKinds> next;  // first unwritten tile of each kind
  for (int kind = 0; kind < kTileKinds; ++kind) next[kind] = layout.kinds[kind].In(to);
  WorkTile* next_cascade = layout.cascades.In(to);
  WorkTile* const members = next_cascade + layout.cascades.count;
  for (const WorkItem& item : plan.items) {
    WorkTile* const tile =
        item.IsCascade() ? next_cascade++ : next[plan.costs->KindOf(item.tile_rows)]++;
    MakeTile(batch, item, plan, tile);
    if (!item.IsCascade()) continue;
    tile->first_member = static_cast<int32_t>(members + item.first_cascade_span - tile);
  }
  WorkTile* next_member = members;
  for (const CascadeSpan& span : plan.cascade_spans) MakeMember(plan, span, next_member++);
  WorkTile* next_combine = layout.combines.In(to);
  for (const CombineItem& combine : plan.combines) {
    if (HasRecord(batch.geometry, combine, *plan.costs)) MakeCombine(combine, next_combine++);
  }
}

}  // namespace flashcore::kernels
