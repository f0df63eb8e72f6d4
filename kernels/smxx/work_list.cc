#include "kernels/smxx/work_list.h"

#include <cstring>
#include <type_traits>

namespace flashcore::kernels {
namespace {

static_assert(std::is_trivially_copyable_v<Span> && std::is_trivially_copyable_v<WorkItem> &&
              std::is_trivially_copyable_v<CombineItem>);
// Parts follow each other in order of alignment, so none needs padding.
static_assert(sizeof(Span) % alignof(WorkItem) == 0 &&
              sizeof(WorkItem) % alignof(CombineItem) == 0);

int TileKind(const WorkItem& item) {
  int kind = 0;
  while (kCudaTileRows[kind] < item.row_count) ++kind;
  return kind;
}

// Writes `count` elements to the block's place for `part`, which points into the block.
template <class T>
void CopyPart(const T* from, size_t count, const T* part, std::byte* block) {
  if (count == 0) return;
  const ptrdiff_t offset = reinterpret_cast<const std::byte*>(part) - block;
  std::memcpy(block + offset, from, count * sizeof(T));
}

}  // namespace

size_t WorkListBytes(const AttentionBatch& batch, const Plan& plan) {
  return batch.num_spans * sizeof(Span) + plan.items.size() * sizeof(WorkItem) +
         plan.combines.size() * sizeof(CombineItem);
}

WorkListView::WorkListView(const AttentionBatch& batch, const Plan& plan, const void* block)
    : spans(static_cast<const Span*>(block)) {
  std::array<int32_t, kCudaTileKinds> counts = {};
  for (const WorkItem& item : plan.items) ++counts[TileKind(item)];
  auto* items = reinterpret_cast<const WorkItem*>(spans + batch.num_spans);
  for (int kind = 0; kind < kCudaTileKinds; ++kind) {
    tiles[kind] = {items, counts[kind]};
    items += counts[kind];
  }
  combines = reinterpret_cast<const CombineItem*>(items);
}

void PackWorkList(const AttentionBatch& batch, const Plan& plan, std::byte* to) {
  const WorkListView view(batch, plan, to);
  CopyPart(batch.spans, batch.num_spans, view.spans, to);
  std::array<const WorkItem*, kCudaTileKinds> next;  // place of each kind's next item
  for (int kind = 0; kind < kCudaTileKinds; ++kind) next[kind] = view.tiles[kind].items;
  for (const WorkItem& item : plan.items) CopyPart(&item, 1, next[TileKind(item)]++, to);
  CopyPart(plan.combines.data(), plan.combines.size(), view.combines, to);
}

}  // namespace flashcore::kernels
