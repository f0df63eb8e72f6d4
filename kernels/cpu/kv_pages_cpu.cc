#include <cstring>
#include <functional>

#include "kernels/cpu/thread_pool.h"
#include "kernels/fp8.h"
#include "kernels/int8.h"
#include "kernels/kv_pages.h"

namespace flashcore::kernels {
namespace {

// Below this many bytes a call stays on the calling thread: one core copies them in about 20 us,
// and waking and joining a second one takes 6 us.
constexpr int64_t kMinParallelBytes = 256 * 1024;

// Runs fn(i, thread) for every i in [0, count), which together write `bytes`.
template <class Fn>
void ForEach(int32_t count, int64_t bytes, ThreadPool* threads, const Fn& fn) {
  if (threads == nullptr || bytes < kMinParallelBytes) {
    for (int32_t i = 0; i < count; ++i) fn(i, 0);
    return;
  }
  threads->ParallelFor(count, std::cref(fn));  // std::function would allocate for a copy
}

// Copies `rows` rows of row_bytes, from_stride bytes apart, to contiguous rows at `to`.
void PackRows(const std::byte* from, int64_t from_stride, int32_t rows, int64_t row_bytes,
              std::byte* to) {
  if (from_stride == row_bytes) {
    std::memcpy(to, from, rows * row_bytes);
    return;
  }
  for (int32_t i = 0; i < rows; ++i) {
    std::memcpy(to + i * row_bytes, from + i * from_stride, row_bytes);
  }
}

// The same, quantised to E4M3.
void QuantiseRows(const PageLayout& layout, const std::byte* from, int64_t from_stride,
                  int32_t rows, float scale, std::byte* to) {
  for (int32_t i = 0; i < rows; ++i) {
    for (int32_t d = 0; d < layout.head_dim; ++d) {
      uint16_t element;
      std::memcpy(&element, from + i * from_stride + d * sizeof(element), sizeof(element));
      *to++ = std::byte{FloatToE4M3(ToFloat(layout.dtype, element) / scale)};
    }
  }
}

// The same, quantised to INT8, with the scales of the rows at `scales`.
void QuantiseRowsToInt8(const PageLayout& layout, const std::byte* from, int64_t from_stride,
                        int32_t rows, std::byte* to, std::byte* scales) {
  for (int32_t i = 0; i < rows; ++i) {
    const uint16_t scale = QuantiseToInt8(layout.dtype, from + i * from_stride, layout.head_dim,
                                          to + i * layout.row_bytes());
    std::memcpy(scales + i * sizeof(scale), &scale, sizeof(scale));
  }
}

// K or V of all heads, from `from` to `page`. `scale` is null unless the page is FP8.
void AppendRows(const PageLayout& layout, const RowAppend& append, const std::byte* from,
                const float* scale, std::byte* page) {
  for (int32_t head = 0; head < layout.num_kv_heads; ++head) {
    std::byte* const to = page + head * layout.head_bytes() + append.row * layout.row_bytes();
    switch (layout.kv_dtype) {
      case KvDType::kSameAsQuery:
        PackRows(from, append.row_stride, append.rows, layout.row_bytes(), to);
        break;
      case KvDType::kFloat8E4M3:
        QuantiseRows(layout, from, append.row_stride, append.rows, scale[head], to);
        break;
      case KvDType::kInt8:
        QuantiseRowsToInt8(layout, from, append.row_stride, append.rows, to,
                           page + layout.scales_offset(head) + append.row * sizeof(uint16_t));
        break;
    }
    from += append.head_stride;
  }
}

void AppendKeysAndValues(const PageLayout& layout, const RowAppend& append) {
  AppendRows(layout, append, append.key, append.key_scale, append.page);
  AppendRows(layout, append, append.value, append.value_scale, append.page + layout.value_offset());
}

}  // namespace

void AppendRowsCpu(const PageLayout& layout, const RowAppend* appends, int32_t count,
                   ThreadPool* threads) {
  int64_t rows = 0;
  for (int32_t i = 0; i < count; ++i) rows += appends[i].rows;
  ForEach(count, rows * (layout.page_bytes() / kPageTokens), threads,
          [&](int i, int) { AppendKeysAndValues(layout, appends[i]); });
}

void CopyPagesCpu(int64_t page_bytes, const PageCopy* copies, int32_t count, ThreadPool* threads) {
  ForEach(count, count * page_bytes, threads,
          [&](int i, int) { std::memcpy(copies[i].to, copies[i].from, page_bytes); });
}

}  // namespace flashcore::kernels
