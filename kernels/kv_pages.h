// The seam for writing K/V pages, on any device. A page holds K then V of kPageTokens tokens of one
// layer of one sequence, each [kv_heads][kPageTokens][head_dim], contiguous; in 8-bit pages, the
// scales of the kPageTokens rows of a head follow these rows. KvView in kernels/attention.h
// describes how kernels read it.
//
// These structs own no memory, and the functions check nothing.
#ifndef FLASHCORE_KERNELS_KV_PAGES_H_
#define FLASHCORE_KERNELS_KV_PAGES_H_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"

namespace flashcore::kernels {

class ThreadPool;  // kernels/cpu/thread_pool.h

// Common to all pages of one call.
struct PageLayout {
  DType dtype = DType::kFloat16;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  KvDType kv_dtype = KvDType::kSameAsQuery;

  int64_t row_bytes() const {
    return head_dim * static_cast<int64_t>(KvElementBytes(dtype, kv_dtype));
  }
  int64_t head_bytes() const {
    return kPageTokens * (row_bytes() + static_cast<int64_t>(KvRowScaleBytes(kv_dtype)));
  }
  // From the start of K or V of a page to the scales of a head's rows.
  int64_t scales_offset(int32_t head) const {
    return head * head_bytes() + kPageTokens * row_bytes();
  }
  int64_t value_offset() const {
    return num_kv_heads * head_bytes();
  }  // from the start of a page to its V
  int64_t page_bytes() const { return 2 * value_offset(); }
};

inline PageLayout PageLayoutOf(const Geometry& geometry) {
  return {geometry.dtype, geometry.num_kv_heads, geometry.head_dim, geometry.kv_dtype};
}

// Writes rows [row, row + rows) of one page. Row i of KV head h of K is read from
// key + i * row_stride + h * head_stride, that of V from value + the same offset. Source elements
// have the layout's dtype. 8-bit pages store each row as kernels/kv_8bit.h says.
struct RowAppend {
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  int64_t row_stride = 0;   // bytes, of the source
  int64_t head_stride = 0;  // bytes, of the source
  std::byte* page = nullptr;
  int32_t row = 0;   // first row of the page to write
  int32_t rows = 0;  // at least 1; row + rows <= kPageTokens
};

// Copies a whole page. `from` and `to` do not overlap.
struct PageCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
};

// CPU versions, complete on return. Large calls use `threads` (null: only the calling thread). No
// two items of a call write the same bytes, and none reads what another writes.
void AppendRowsCpu(const PageLayout& layout, const RowAppend* appends, int32_t count,
                   ThreadPool* threads);
void CopyPagesCpu(int64_t page_bytes, const PageCopy* copies, int32_t count, ThreadPool* threads);

// CUDA versions, enqueued on the cudaStream_t `stream`; only in builds with CUDA. Pages are in
// device memory. The arrays and sources are in device memory or mapped host memory; but up to
// kAppendsInParameters `appends` are in host memory, and read before the return. Every pointer and
// stride is a multiple of 16 bytes. They return 0 or the cudaError_t of the launch.
inline constexpr int32_t kAppendsInParameters = 50;
int AppendRowsCuda(const PageLayout& layout, const RowAppend* appends, int32_t count, void* stream);
int CopyPagesCuda(int64_t page_bytes, const PageCopy* copies, int32_t count, void* stream);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_KV_PAGES_H_
