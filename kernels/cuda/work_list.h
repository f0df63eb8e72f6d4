// The work list of a launch: a WorkSpan per span, their page tables and a WorkTile per work item,
// packed into one range of bytes. It travels in the kernel's parameters, where a block reads it as
// constants, or if it is too large, the caller copies it to the device. A launch has a thread block
// per WorkTile and KV head. Partial results of more than 16 rows, of spans that share cascade
// items, and many of one tile are combined by a second kernel, which has a record of each tile.
// Cascade items have one more record for each of their spans, their members; items of the same
// spans have them in common.
//
//   | spans      | pages     | tiles of 16 to 128 rows | to combine | cascade items | members    |
//     WorkSpan[]   int32_t[]   WorkTile[] each           WorkTile[]   WorkTile[]      WorkTile[]
#ifndef FLASHCORE_KERNELS_CUDA_WORK_LIST_H_
#define FLASHCORE_KERNELS_CUDA_WORK_LIST_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/plan.h"

#ifdef __CUDACC__
#define FLASHCORE_HOST_DEVICE __host__ __device__
#else
#define FLASHCORE_HOST_DEVICE
#endif

namespace flashcore::kernels {

// Packed rows of the largest cascade item of a CUDA kernel.
inline constexpr int32_t kCudaCascadeRows = 64;

// Divides by a fixed divisor with a multiplication and shifts: packed row -> query row.
struct RowDivider {
  explicit RowDivider(int32_t divisor);

  // dividend / divisor, for dividend >= 0. Granlund and Montgomery, "Division by invariant integers
  // using multiplication", 1994.
  FLASHCORE_HOST_DEVICE int32_t Divide(int32_t dividend) const {
    return static_cast<int32_t>(uint64_t{2u * dividend} * multiplier >> 32 >> shift);
  }

  int32_t divisor;
  uint32_t multiplier;  // 2^(31 + shift) / divisor, rounded up
  uint32_t shift;       // the smallest with 2^shift >= divisor
};

// The tensors of a span. All pointers are device pointers, to KV head 0. Strides are in bytes,
// those of LSE in elements.
struct alignas(16) WorkSpan {
  const std::byte* query;  // as in Span
  std::byte* output;
  int64_t row_stride;
  int64_t head_stride;
  int64_t group_stride;  // from one KV head's query heads to the next KV head's
  const std::byte* key;  // as in KvView
  const std::byte* value;
  int64_t page_stride;
  int64_t kv_head_stride;
  int64_t kv_row_stride;
  float* lse;  // as in Span
  int64_t lse_row_stride;
  int64_t lse_head_stride;

  int32_t position;  // of query row 0 among the K/V rows: kv_rows - query_rows
  Terms terms;
  int32_t first_page;  // its distance from this record, in pages; 0: K and V are dense

  // The page of K/V row `row`; dense K and V have their pages in order.
  FLASHCORE_HOST_DEVICE int32_t PageOf(int32_t row) const {
    const int32_t page = row / kPageTokens;
    return first_page > 0 ? reinterpret_cast<const int32_t*>(this)[first_page + page] : page;
  }
};

// The packed rows [row_begin, row_begin + row_count) of a span and the K/V rows [kv_begin, kv_end)
// that they attend to, for every KV head.
struct alignas(16) WorkTile {
  int32_t span;  // index among the WorkSpans
  int32_t row_begin;
  int16_t row_count;
  int16_t run_parts;  // as in CombineItem
  int32_t kv_begin;
  int32_t kv_end;
  int32_t split_rows;  // K/V rows of a split. From kv_begin to kv_end: the item is one split
  int32_t all_begin;   // K/V rows [all_begin, all_end) are visible to every packed row
  int32_t all_end;

  // One part: the block writes O and LSE. More: it writes partial rows, to be combined. Each split
  // of a run but the last writes the partial rows in any case, for the next to add.
  // A cascade item has members instead, of equally many rows, which follow each other in the item:
  // it is the same part of each.
  int32_t part;
  union {
    int32_t num_parts;
    int32_t num_members;
  };
  int32_t first_partial_row;  // of KV head 0
  union {
    // Index of KV head 0 in CudaResources::finished; -1: the last part does not combine.
    int32_t combine;
    int32_t first_member;  // its distance from this record
  };

  FLASHCORE_HOST_DEVICE bool IsRun() const { return kv_end - kv_begin > split_rows; }

  // First partial row of part `of_part`.
  FLASHCORE_HOST_DEVICE int32_t PartialRow(int kv_head, int32_t of_part) const {
    return first_partial_row + (kv_head * num_parts + of_part) * row_count;
  }
};

// The work of a block.
struct Work {
  // The part of a cascade item for one span.
  FLASHCORE_HOST_DEVICE Work Member(int member) const {
    const WorkTile& of_member = (&tile)[tile.first_member + member];
    return {of_member, (&span)[of_member.span - tile.span]};
  }

  const WorkTile& tile;
  const WorkSpan& span;  // of the tile
};

// Bytes of kernel parameters that a launch has for a work list: CUDA 12.1 and driver 530 allow
// 32,764, of which LaunchParams takes some.
inline constexpr size_t kMaxListInParameters = 32640;

// Alignment of a work list, in host and device memory.
inline constexpr size_t kWorkListAlignment = 64;

// Where the parts of the work list of a batch are, and its bytes.
struct WorkListLayout {
  WorkListLayout(const AttentionBatch& batch, const Plan& plan);

  struct TileArray {
    WorkTile* In(void* list) const {
      return reinterpret_cast<WorkTile*>(static_cast<std::byte*>(list) + begin);
    }

    size_t begin = 0;  // a byte of the list
    int32_t count = 0;
    int32_t members = 0;    // that follow the tiles
    int32_t most_rows = 0;  // packed rows of the largest
    bool has_runs = false;
  };

  // Bytes that the caller copies to the device: all or, if the list fits the kernel's parameters,
  // 0.
  size_t BytesInMemory() const { return bytes <= kMaxListInParameters ? 0 : bytes; }

  size_t bytes;
  size_t head_bytes;  // of spans and pages, which every launch needs
  // [kind]: the tiles of spans whose largest tile fits PlanCosts::tiles[kind] and no smaller kind,
  // longest first.
  std::array<TileArray, kTileKinds> kinds;
  TileArray combines;
  TileArray cascades;  // longest first
};

// Writes the work list of `batch` to `to`. Every pointer of the spans but kv.pages, which is read
// here, must be a device pointer. `plan` was made with item_per_kv_head false, and `layout` of
// both.
void PackWorkList(const AttentionBatch& batch, const Plan& plan, const WorkListLayout& layout,
                  std::byte* to);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CUDA_WORK_LIST_H_
