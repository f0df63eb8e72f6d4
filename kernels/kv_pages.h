// The seam for writing K/V pages, on any device. A page holds K then V of kPageTokens tokens of one
// layer of one sequence, each [kv_heads][kPageTokens][head_dim], elements contiguous; reading it is
// kernels/attention.h's KvView.
//
// Nothing here owns memory and nothing here is checked.
#ifndef FLASHCORE_KERNELS_KV_PAGES_H_
#define FLASHCORE_KERNELS_KV_PAGES_H_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"

namespace flashcore::kernels {

class ThreadPool;  // kernels/cpu/thread_pool.h

// What the pages of one launch have in common.
struct PageLayout {
  DType dtype = DType::kFloat16;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  KvDType kv_dtype = KvDType::kSameAsQuery;

  int64_t row_bytes() const {
    return head_dim * static_cast<int64_t>(KvElementBytes(dtype, kv_dtype));
  }
  int64_t head_bytes() const { return kPageTokens * row_bytes(); }
  int64_t value_offset() const { return num_kv_heads * head_bytes(); }  // of V, from the page
  int64_t page_bytes() const { return 2 * value_offset(); }
};

// K/V rows on their way into one page: rows [row, row + rows) of *page are written. Row i of KV
// head h is read from key + i * row_stride + h * head_stride, and likewise from value (bytes): its
// elements are of the layout's dtype. FP8 pages get E4M3 of element / scale, rounded to nearest
// even: what is out of range becomes the largest magnitude, an infinity too, and NaN stays NaN.
struct RowAppend {
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  int64_t row_stride = 0;   // bytes, of the source
  int64_t head_stride = 0;  // bytes, of the source
  std::byte* page = nullptr;
  int32_t row = 0;                     // first row of the page to write
  int32_t rows = 0;                    // at least 1; row + rows <= kPageTokens
  const float* key_scale = nullptr;    // [kv_heads], finite and positive; for FP8 pages only
  const float* value_scale = nullptr;  // [kv_heads], likewise
};

// A whole page, copied. The two do not overlap.
struct PageCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
};

// On the CPU, shared among `threads` if that pays (null: the calling thread does it all), complete
// on return. No two items of a call write the same bytes, and none reads what another writes.
void AppendRowsCpu(const PageLayout& layout, const RowAppend* appends, int32_t count,
                   ThreadPool* threads);
void CopyPagesCpu(int64_t page_bytes, const PageCopy* copies, int32_t count, ThreadPool* threads);

// The same on a CUDA device, enqueued on the cudaStream_t `stream`; only in builds that have CUDA.
// The arrays and all that they point to are in device memory, or, but for the pages, in mapped host
// memory; every pointer and stride is a multiple of 16 bytes (scales: of 4). Return 0 or the
// cudaError_t of the launch.
int AppendRowsCuda(const PageLayout& layout, const RowAppend* appends, int32_t count, void* stream);
int CopyPagesCuda(int64_t page_bytes, const PageCopy* copies, int32_t count, void* stream);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_KV_PAGES_H_
