#include "kernels/smxx/work_list.h"

#include <algorithm>
#include <new>

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

// Whether the item's tile has one more record, to be combined by a launch of its own.
bool IsFirstToCombine(const Plan& plan, const WorkItem& item) {
  return TileKind(item) > 0 && item.combine >= 0 &&
         item.partial_row == plan.combines[item.combine].first_partial_row;
}

int32_t CountCombines(const Plan& plan) {
  return static_cast<int32_t>(
      std::count_if(plan.items.begin(), plan.items.end(),
                    [&](const WorkItem& item) { return IsFirstToCombine(plan, item); }));
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
  span.pages = from.kv.pages;
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
  if (item.combine >= 0) {
    const CombineItem& combine = plan.combines[item.combine];
    tile.part_splits = static_cast<int16_t>(combine.part_splits);
    tile.part = (item.partial_row - combine.first_partial_row) / combine.row_count;
    tile.num_parts = combine.num_parts;
    tile.first_partial_row = combine.first_partial_row;
    tile.combine = item.combine;
  }
}

}  // namespace

RowDivider::RowDivider(int32_t by) : divisor(by), shift(0) {
  while ((int64_t{1} << shift) < by) ++shift;
  const uint64_t power = uint64_t{1} << (31 + shift);
  multiplier = static_cast<uint32_t>((power + by - 1) / by);
}

size_t WorkListBytes(const AttentionBatch& batch, const Plan& plan) {
  const size_t tiles = plan.items.size() + CountCombines(plan);
  return batch.num_spans * sizeof(WorkSpan) + tiles * sizeof(WorkTile);
}

size_t WorkListBytesInMemory(const AttentionBatch& batch, const Plan& plan) {
  const size_t bytes = WorkListBytes(batch, plan);
  return bytes <= kMaxListInParameters ? 0 : bytes;
}

WorkListView::WorkListView(const AttentionBatch& batch, const Plan& plan, void* work_list)
    : spans(static_cast<WorkSpan*>(work_list)) {
  std::array<int32_t, kCudaTileKinds> counts = {};
  std::array<bool, kCudaTileKinds> has_runs = {};
  for (const WorkItem& item : plan.items) {
    const int kind = TileKind(item);
    ++counts[kind];
    has_runs[kind] |= item.IsRun();
  }
  auto* tiles = reinterpret_cast<WorkTile*>(spans + batch.num_spans);
  for (int kind = 0; kind < kCudaTileKinds; ++kind) {
    kinds[kind] = {tiles, counts[kind], has_runs[kind]};
    tiles += counts[kind];
  }
  combines = {tiles, CountCombines(plan), false};
}

void PackWorkList(const AttentionBatch& batch, const Plan& plan, std::byte* to) {
  const WorkListView view(batch, plan, to);
  const int32_t group = batch.geometry.group();
  for (int32_t s = 0; s < batch.num_spans; ++s) {
    new (view.spans + s) WorkSpan(MakeSpan(group, batch.spans[s]));
  }
  std::array<WorkTile*, kCudaTileKinds> next;  // first unwritten tile of each kind
  for (int kind = 0; kind < kCudaTileKinds; ++kind) next[kind] = view.kinds[kind].tiles;
  WorkTile* next_combine = view.combines.tiles;
  for (const WorkItem& item : plan.items) {
    WorkTile* const tile = next[TileKind(item)]++;
    MakeTile(group, batch.spans[item.span], item, plan, tile);
    if (IsFirstToCombine(plan, item)) new (next_combine++) WorkTile(*tile);
  }
}

}  // namespace flashcore::kernels
