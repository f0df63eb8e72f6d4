#include "kernels/smxx/work_list.h"

#include <algorithm>
#include <new>

namespace flashcore::kernels {
namespace {

// Only spans with few rows in all get the smallest kind, whose kernel gives a row other bits. The
// last tile of a larger span may have as few rows, but must give the bits of its other tiles.
int TileKind(const AttentionBatch& batch, int32_t group, const WorkItem& item) {
  const int32_t rows = batch.spans[item.span].query_rows * group;
  int kind = rows <= kCudaTileRows[0] ? 0 : 1;
  while (kCudaTileRows[kind] < item.row_count) ++kind;
  return kind;
}

WorkTile MakeTile(int32_t group, const Span& span, const WorkItem& item, const Plan& plan) {
  WorkTile tile = {};
  tile.query = span.query;
  tile.output = span.output;
  tile.row_stride = span.row_stride;
  tile.head_stride = span.head_stride;
  tile.group_stride = group * span.head_stride;
  tile.key = span.kv.key;
  tile.value = span.kv.value;
  tile.pages = span.kv.pages;
  tile.page_stride = span.kv.page_stride;
  tile.kv_head_stride = span.kv.head_stride;
  tile.kv_row_stride = span.kv.row_stride;
  tile.key_scale = span.kv.key_scale;
  tile.value_scale = span.kv.value_scale;
  tile.lse = span.lse;
  tile.lse_row_stride = span.lse_row_stride;
  tile.lse_head_stride = span.lse_head_stride;

  tile.row_begin = item.row_begin;
  tile.row_count = item.row_count;
  tile.kv_begin = item.kv_begin;
  tile.kv_end = item.kv_end;
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
  tile.position = span.kv.rows - span.query_rows;
  tile.mask = span.mask;
  tile.softmax_scale = span.softmax_scale;

  tile.num_splits = 1;
  if (item.partial_row >= 0) {
    const CombineItem& combine = plan.combines[item.combine];
    tile.split = (item.partial_row - combine.first_partial_row) / combine.row_count;
    tile.num_splits = combine.num_splits;
    tile.first_partial_row = combine.first_partial_row;
    tile.combine = item.combine;
  }
  return tile;
}

}  // namespace

RowDivider::RowDivider(int32_t by) : divisor(by), shift(0) {
  while ((int64_t{1} << shift) < by) ++shift;
  const uint64_t power = uint64_t{1} << (31 + shift);
  multiplier = static_cast<uint32_t>((power + by - 1) / by);
}

size_t WorkListBytes(const Plan& plan) {
  return plan.items.size() * sizeof(WorkTile) + plan.combines.size() * sizeof(int32_t);
}

WorkListView::WorkListView(const AttentionBatch& batch, const Plan& plan, void* work_list) {
  std::array<int32_t, kCudaTileKinds> counts = {};
  const int32_t group = batch.geometry.group();
  for (const WorkItem& item : plan.items) ++counts[TileKind(batch, group, item)];
  auto* tiles = static_cast<WorkTile*>(work_list);
  for (int kind = 0; kind < kCudaTileKinds; ++kind) {
    kinds[kind] = {tiles, counts[kind]};
    tiles += counts[kind];
  }
  finished = reinterpret_cast<int32_t*>(tiles);
}

void PackWorkList(const AttentionBatch& batch, const Plan& plan, std::byte* to) {
  const WorkListView view(batch, plan, to);
  std::array<WorkTile*, kCudaTileKinds> next;  // first unwritten tile of each kind
  for (int kind = 0; kind < kCudaTileKinds; ++kind) next[kind] = view.kinds[kind].tiles;
  const int32_t group = batch.geometry.group();
  for (const WorkItem& item : plan.items) {
    new (next[TileKind(batch, group, item)]++)
        WorkTile(MakeTile(group, batch.spans[item.span], item, plan));
  }
  std::fill_n(view.finished, plan.combines.size(), 0);
}

}  // namespace flashcore::kernels
