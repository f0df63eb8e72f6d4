#include "kernels/smxx/work_list.h"

#include <algorithm>
#include <new>
#include <tuple>
#include <utility>

namespace flashcore::kernels {
namespace {

// All tiles of a span have one kind, so that they run in one launch: the last has as many rows as
// are left. Only spans with few rows in all get the smallest kind, whose kernel gives a row other
// bits.
int TileKind(const WorkItem& item) {
  int kind = 0;
  while (kCudaTileRows[kind] < item.tile_rows) ++kind;
  return kind;
}

bool IsCascade(const WorkItem& item) { return item.num_cascade_spans > 0; }

// Whether the item, or a span's part of a cascade item, is the first of its tile.
template <class Item>
bool IsFirstPart(const Plan& plan, const Item& item) {
  return item.combine >= 0 && item.partial_row == plan.combines[item.combine].first_partial_row;
}

// Whether the item's tile has one more record, to be combined by a launch of its own. So does every
// first part of a cascade item.
bool IsFirstToCombine(const Plan& plan, const WorkItem& item) {
  return TileKind(item) > 0 && IsFirstPart(plan, item);
}

// Tiles to combine by a launch of their own: how many, and the packed rows of the largest.
std::pair<int32_t, int32_t> CombinesOf(const Plan& plan) {
  int32_t count = 0, most_rows = 0;
  const auto add = [&](int32_t rows) {
    ++count;
    most_rows = std::max(most_rows, rows);
  };
  for (const WorkItem& item : plan.items) {
    if (IsFirstToCombine(plan, item)) add(item.row_count);
  }
  for (const CascadeSpan& span : plan.cascade_spans) {
    if (IsFirstPart(plan, span)) add(span.row_count);
  }
  return {count, most_rows};
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
  span.key_scale = from.kv.key_scale;
  span.value_scale = from.kv.value_scale;
  span.lse = from.lse;
  span.lse_row_stride = from.lse_row_stride;
  span.lse_head_stride = from.lse_head_stride;
  span.position = from.kv.rows - from.query_rows;
  span.mask = from.mask;
  span.softmax_scale = from.softmax_scale;
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

// Sets where the partial results of an item, or of one span of a cascade item, are and which part
// of its tile's they are.
void SetParts(const Plan& plan, int32_t combine_index, int32_t partial_row, WorkTile* tile) {
  const CombineItem& combine = plan.combines[combine_index];
  tile->part_splits = static_cast<int16_t>(combine.part_splits);
  tile->part = (partial_row - combine.first_partial_row) / combine.row_count;
  tile->num_parts = combine.num_parts;
  tile->first_partial_row = combine.first_partial_row;
  tile->combine = combine.has_cascade ? -1 : combine_index;
}

// Written in place: a copy of what was just written in parts waits for it.
void MakeTile(int32_t group, const Span& span, const WorkItem& item, const Plan& plan,
              WorkTile* to) {
  WorkTile& tile = *new (to) WorkTile();
  tile.span = item.span;
  tile.row_begin = item.row_begin;
  tile.row_count = static_cast<int16_t>(item.row_count);
  tile.kv_begin = item.kv_begin;
  tile.kv_end = item.kv_end;
  tile.split_rows = std::min(item.split_rows, item.kv_end - item.kv_begin);
  if (IsCascade(item)) {
    tile.all_begin = item.kv_begin;
    tile.all_end = item.kv_end;
    tile.num_members = item.num_cascade_spans;
    return;
  }
  // Visible ranges move right with the row: the first row's ends first, the last row's begins last.
  const int32_t first = item.row_begin / group;
  const int32_t last = (item.row_begin + item.row_count - 1) / group;
  const auto visible_to = [&span](int32_t row) {
    return VisibleKv(span.mask, span.query_rows, span.kv.rows, row, row + 1);
  };
  const KvRange to_first = visible_to(first);
  const KvRange to_last = last == first ? to_first : visible_to(last);
  const bool none = to_first.begin == to_first.end || to_last.begin == to_last.end;
  tile.all_begin = none ? item.kv_end : to_last.begin;
  tile.all_end = none ? item.kv_end : std::min(to_first.end, item.kv_end);

  tile.part_splits = 1;
  tile.num_parts = 1;
  tile.first_partial_row = item.partial_row;
  if (item.combine >= 0) SetParts(plan, item.combine, item.partial_row, &tile);
}

// Writes the members of a cascade item from `*next_member` on, those that are first parts from
// `*next_combine` on, too, and to the item's tile where they are.
void MakeMembers(const WorkItem& item, const Plan& plan, WorkTile* tile, WorkTile** next_member,
                 WorkTile** next_combine) {
  tile->first_member = static_cast<int32_t>(*next_member - tile);
  for (int32_t n = 0; n < item.num_cascade_spans; ++n) {
    const CascadeSpan& span = plan.cascade_spans[item.first_cascade_span + n];
    WorkTile& member = *new ((*next_member)++) WorkTile();
    member.span = span.span;
    member.row_count = static_cast<int16_t>(span.row_count);
    SetParts(plan, span.combine, span.partial_row, &member);
    if (IsFirstPart(plan, span)) new ((*next_combine)++) WorkTile(member);
  }
}

}  // namespace

RowDivider::RowDivider(int32_t by) : divisor(by), shift(0) {
  while ((int64_t{1} << shift) < by) ++shift;
  const uint64_t power = uint64_t{1} << (31 + shift);
  multiplier = static_cast<uint32_t>((power + by - 1) / by);
}

size_t WorkListBytes(const AttentionBatch& batch, const Plan& plan) {
  const size_t tiles = plan.items.size() + CombinesOf(plan).first + plan.cascade_spans.size();
  return HeadBytes(batch) + tiles * sizeof(WorkTile);
}

size_t WorkListBytesInMemory(const AttentionBatch& batch, const Plan& plan) {
  const size_t bytes = WorkListBytes(batch, plan);
  return bytes <= kMaxListInParameters ? 0 : bytes;
}

WorkListView::WorkListView(const AttentionBatch& batch, const Plan& plan, void* work_list)
    : spans(static_cast<WorkSpan*>(work_list)),
      pages(reinterpret_cast<int32_t*>(spans + batch.num_spans)),
      head_bytes(HeadBytes(batch)) {
  for (const WorkItem& item : plan.items) {
    TileArray& array = IsCascade(item) ? cascades : kinds[TileKind(item)];
    ++array.count;
    array.most_rows = std::max(array.most_rows, item.row_count);
    array.has_runs |= !IsCascade(item) && item.IsRun();
  }
  cascades.members = static_cast<int32_t>(plan.cascade_spans.size());
  std::tie(combines.count, combines.most_rows) = CombinesOf(plan);
  auto* tiles = reinterpret_cast<WorkTile*>(static_cast<std::byte*>(work_list) + head_bytes);
  const auto place = [&](TileArray* array) {
    array->tiles = tiles;
    tiles += array->count;
  };
  for (TileArray& kind : kinds) place(&kind);
  place(&combines);
  place(&cascades);
}

void PackWorkList(const AttentionBatch& batch, const Plan& plan, std::byte* to) {
  const WorkListView view(batch, plan, to);
  const int32_t group = batch.geometry.group();
  int32_t* next_page = view.pages;
  for (int32_t s = 0; s < batch.num_spans; ++s) {
    const KvView& kv = batch.spans[s].kv;
    WorkSpan& span = *new (view.spans + s) WorkSpan(MakeSpan(group, batch.spans[s]));
    if (kv.pages == nullptr) continue;
    span.first_page = static_cast<int32_t>(next_page - reinterpret_cast<int32_t*>(&span));
    next_page = std::copy_n(kv.pages, PagesFor(kv.rows), next_page);
  }
  std::array<WorkTile*, kCudaTileKinds> next;  // first unwritten tile of each kind
  for (int kind = 0; kind < kCudaTileKinds; ++kind) next[kind] = view.kinds[kind].tiles;
  WorkTile* next_combine = view.combines.tiles;
  WorkTile* next_cascade = view.cascades.tiles;
  WorkTile* next_member = view.cascades.tiles + view.cascades.count;
  for (const WorkItem& item : plan.items) {
    WorkTile* const tile = IsCascade(item) ? next_cascade++ : next[TileKind(item)]++;
    MakeTile(group, batch.spans[item.span], item, plan, tile);
    if (IsCascade(item)) MakeMembers(item, plan, tile, &next_member, &next_combine);
    if (IsFirstToCombine(plan, item)) new (next_combine++) WorkTile(*tile);
  }
}

}  // namespace flashcore::kernels
