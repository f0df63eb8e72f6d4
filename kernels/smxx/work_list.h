// What the kernels of one launch read besides tensors: the work of every thread block, packed into
// one block of bytes that the caller copies to the device in one go (and may put next to whatever
// else it copies there).
#ifndef FLASHCORE_KERNELS_SMXX_WORK_LIST_H_
#define FLASHCORE_KERNELS_SMXX_WORK_LIST_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/plan.h"
#include "kernels/tile_config.h"

#ifdef __CUDACC__
#define FLASHCORE_HOST_DEVICE __host__ __device__
#else
#define FLASHCORE_HOST_DEVICE
#endif

namespace flashcore::kernels {

// Divides packed rows by the query heads per KV head without a division.
struct RowDivider {
  explicit RowDivider(int32_t divisor);

  // dividend / divisor, for a dividend that is not negative. Granlund and Montgomery, "Division by
  // invariant integers using multiplication", 1994.
  FLASHCORE_HOST_DEVICE int32_t Divide(int32_t dividend) const {
    return static_cast<int32_t>(uint64_t{2u * dividend} * multiplier >> 32 >> shift);
  }

  int32_t divisor;
  uint32_t multiplier;  // 2^(31 + shift) / divisor, rounded up
  uint32_t shift;       // the smallest with 2^shift >= divisor
};

// What a thread block does, for each KV head h: it attends the packed rows [row_begin, row_begin +
// row_count) of one span to the K/V rows [kv_begin, kv_end). All pointers are device pointers and
// strides are in bytes, but those of the LSE; KV head h is that much further.
struct alignas(16) BlockWork {
  const std::byte* query;  // as in Span
  std::byte* output;
  int64_t row_stride;
  int64_t head_stride;
  int64_t group_stride;  // of the query heads of one KV head
  const std::byte* key;  // as in KvView
  const std::byte* value;
  const int32_t* pages;
  int64_t page_stride;
  int64_t kv_head_stride;
  int64_t kv_row_stride;
  const float* key_scale;  // as in KvView
  const float* value_scale;
  float* lse;  // as in Span
  int64_t lse_row_stride;
  int64_t lse_head_stride;

  int32_t row_begin;
  int32_t row_count;
  int32_t kv_begin;
  int32_t kv_end;
  int32_t all_begin;  // every packed row sees the K/V rows [all_begin, all_end)
  int32_t all_end;
  int32_t position;  // of query row 0: kv rows - query rows
  Mask mask;
  float softmax_scale;

  // A KV split: which of how many, and where their partial results are. One split: no partials.
  int32_t split;
  int32_t num_splits;
  int32_t first_partial_row;  // of KV head 0
  int32_t combine;            // of KV head 0, in WorkListView::finished

  // First partial row of a split.
  FLASHCORE_HOST_DEVICE int32_t PartialRow(int kv_head, int32_t of_split) const {
    return first_partial_row + (kv_head * num_splits + of_split) * row_count;
  }
};

// Alignment of the block, in host and in device memory.
inline constexpr size_t kWorkListAlignment = 64;

// Bytes that PackWorkList writes for `plan`.
size_t WorkListBytes(const Plan& plan);

// Packs what a launch of `batch` by `plan` reads into the block at `to`. Every pointer of the spans
// must be a device pointer, kv.pages included. `plan` was made with kv_heads_apart off.
void PackWorkList(const AttentionBatch& batch, const Plan& plan, std::byte* to);

// The parts of a block, which may be in device memory: nothing is read.
struct WorkListView {
  WorkListView(const AttentionBatch& batch, const Plan& plan, void* block);

  // The work whose rows fit kCudaTileRows[t] and no smaller tile, longest first.
  struct Works {
    BlockWork* works;
    int32_t count;
  };
  std::array<Works, kCudaTileKinds> tiles;
  int32_t* finished;  // [plan.combines.size()], of each how many splits are there; 0
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SMXX_WORK_LIST_H_
