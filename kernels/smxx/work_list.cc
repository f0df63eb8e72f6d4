#include "kernels/smxx/work_list.h"

#include <algorithm>
#include <new>

namespace flashcore::kernels {
namespace {

// Spans with few rows have a tile of their own. The others' last tiles may have few rows, too, but
// must be like their other tiles for the sake of the bits.
int TileKind(const AttentionBatch& batch, const WorkItem& item) {
  const int32_t rows = batch.spans[item.span].query_rows * batch.geometry.group();
  int kind = rows <= kCudaTileRows[0] ? 0 : 1;
  while (kCudaTileRows[kind] < item.row_count) ++kind;
  return kind;
}

BlockWork MakeWork(const Geometry& geometry, const Span& span, const WorkItem& item,
                   const Plan& plan) {
  BlockWork work = {};
  work.query = span.query;
  work.output = span.output;
  work.row_stride = span.row_stride;
  work.head_stride = span.head_stride;
  work.group_stride = geometry.group() * span.head_stride;
  work.key = span.kv.key;
  work.value = span.kv.value;
  work.pages = span.kv.pages;
  work.page_stride = span.kv.page_stride;
  work.kv_head_stride = span.kv.head_stride;
  work.kv_row_stride = span.kv.row_stride;
  work.key_scale = span.kv.key_scale;
  work.value_scale = span.kv.value_scale;
  work.lse = span.lse;
  work.lse_row_stride = span.lse_row_stride;
  work.lse_head_stride = span.lse_head_stride;

  work.row_begin = item.row_begin;
  work.row_count = item.row_count;
  work.kv_begin = item.kv_begin;
  work.kv_end = item.kv_end;
  // What the first row sees ends first; what the last row sees begins last.
  const int32_t first = item.row_begin / geometry.group();
  const int32_t last = (item.row_begin + item.row_count - 1) / geometry.group();
  const auto seen = [&span](int32_t row) {
    return VisibleKv(span.mask, span.query_rows, span.kv.rows, row, row + 1);
  };
  const KvRange by_first = seen(first), by_last = seen(last);
  const bool some_row_sees_nothing = by_first.begin == by_first.end || by_last.begin == by_last.end;
  work.all_begin = some_row_sees_nothing ? item.kv_end : by_last.begin;
  work.all_end = some_row_sees_nothing ? item.kv_end : std::min(by_first.end, item.kv_end);
  work.position = span.kv.rows - span.query_rows;
  work.mask = span.mask;
  work.softmax_scale = span.softmax_scale;

  work.num_splits = 1;
  if (item.partial_row >= 0) {
    const CombineItem& combine = plan.combines[item.combine];
    work.split = (item.partial_row - combine.first_partial_row) / combine.row_count;
    work.num_splits = combine.num_splits;
    work.first_partial_row = combine.first_partial_row;
    work.combine = item.combine;
  }
  return work;
}

}  // namespace

RowDivider::RowDivider(int32_t by) : divisor(by), shift(0) {
  while ((int64_t{1} << shift) < by) ++shift;
  const uint64_t power = uint64_t{1} << (31 + shift);
  multiplier = static_cast<uint32_t>((power + by - 1) / by);
}

size_t WorkListBytes(const Plan& plan) {
  return plan.items.size() * sizeof(BlockWork) + plan.combines.size() * sizeof(int32_t);
}

WorkListView::WorkListView(const AttentionBatch& batch, const Plan& plan, void* block) {
  std::array<int32_t, kCudaTileKinds> counts = {};
  for (const WorkItem& item : plan.items) ++counts[TileKind(batch, item)];
  auto* works = static_cast<BlockWork*>(block);
  for (int kind = 0; kind < kCudaTileKinds; ++kind) {
    tiles[kind] = {works, counts[kind]};
    works += counts[kind];
  }
  finished = reinterpret_cast<int32_t*>(works);
}

void PackWorkList(const AttentionBatch& batch, const Plan& plan, std::byte* to) {
  const WorkListView view(batch, plan, to);
  std::array<BlockWork*, kCudaTileKinds> next;  // place of each kind's next
  for (int kind = 0; kind < kCudaTileKinds; ++kind) next[kind] = view.tiles[kind].works;
  for (const WorkItem& item : plan.items) {
    new (next[TileKind(batch, item)]++)
        BlockWork(MakeWork(batch.geometry, batch.spans[item.span], item, plan));
  }
  std::fill_n(view.finished, plan.combines.size(), 0);
}

}  // namespace flashcore::kernels
