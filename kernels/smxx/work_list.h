// What the kernels of one launch read besides tensors: the spans, the work items and the combines,
// packed into one block of bytes that the caller copies to the device in one go (and may put next
// to whatever else it copies there).
#ifndef FLASHCORE_KERNELS_SMXX_WORK_LIST_H_
#define FLASHCORE_KERNELS_SMXX_WORK_LIST_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/plan.h"
#include "kernels/tile_config.h"

namespace flashcore::kernels {

// Alignment of the block, in host and in device memory.
inline constexpr size_t kWorkListAlignment = 64;

// Bytes that PackWorkList writes.
size_t WorkListBytes(const AttentionBatch& batch, const Plan& plan);

// Packs what a launch of `batch` by `plan` reads into the block at `to`. Every pointer of the spans
// must be a device pointer, kv.pages included. `plan` must have no shared items.
void PackWorkList(const AttentionBatch& batch, const Plan& plan, std::byte* to);

// The parts of a block, which may be in device memory: nothing is read.
struct WorkListView {
  WorkListView(const AttentionBatch& batch, const Plan& plan, const void* block);

  const Span* spans;  // [batch.num_spans]
  // The items whose rows fit kCudaTileRows[t] and no smaller tile, longest first.
  struct Items {
    const WorkItem* items;
    int32_t count;
  };
  std::array<Items, kCudaTileKinds> tiles;
  const CombineItem* combines;  // [plan.combines.size()]
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SMXX_WORK_LIST_H_
