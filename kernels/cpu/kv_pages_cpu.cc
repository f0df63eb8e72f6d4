#include <cstring>
#include <functional>

#include "kernels/cpu/thread_pool.h"
#include "kernels/kv_8bit.h"
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

// K or V of all heads, from `from` to `page`.
void AppendRows(const PageLayout& layout, const RowAppend& append, const std::byte* from,
                std::byte* page) {
  for (int32_t head = 0; head < layout.num_kv_heads; ++head) {
    if (Is8Bit(layout.kv_dtype)) {
      for (int32_t i = 0; i < append.rows; ++i) {
        Store8BitRow(layout, from + i * append.row_stride, head, append.row + i, page);
      }
    } else {
      PackRows(from, append.row_stride, append.rows, layout.row_bytes(),
               page + head * layout.head_bytes() + append.row * layout.row_bytes());
    }
    from += append.head_stride;
  }
}

void AppendKeysAndValues(const PageLayout& layout, const RowAppend& append) {
  AppendRows(layout, append, append.key, append.page);
  AppendRows(layout, append, append.value, append.page + layout.value_offset());
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
