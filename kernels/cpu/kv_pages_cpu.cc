#include <cstring>
#include <functional>

#include "kernels/cpu/thread_pool.h"
#include "kernels/kv_pages.h"

namespace flashcore::kernels {
namespace {

// Below this many bytes a call stays on the calling thread: one core copies them in some 20 us, so
// a second saves little more than waking and joining it takes (6 us).
constexpr int64_t kMinParallelBytes = 256 * 1024;

// Runs fn(i, thread) for every i in [0, count), which together write `bytes`.
template <class Fn>
void ForEach(int32_t count, int64_t bytes, ThreadPool* threads, const Fn& fn) {
  if (threads == nullptr || bytes < kMinParallelBytes) {
    for (int32_t i = 0; i < count; ++i) fn(i, 0);
    return;
  }
  threads->ParallelFor(count, std::cref(fn));  // a copy would make std::function allocate
}

// Copies `rows` rows of row_bytes, from_stride bytes apart, to where they lie side by side.
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

void AppendRows(const PageLayout& layout, const RowAppend& append) {
  std::byte* to = append.page + append.row * layout.row_bytes();
  for (int32_t head = 0; head < layout.num_kv_heads; ++head) {
    const int64_t from = head * append.head_stride;
    PackRows(append.key + from, append.row_stride, append.rows, layout.row_bytes(), to);
    PackRows(append.value + from, append.row_stride, append.rows, layout.row_bytes(),
             to + layout.value_offset());
    to += layout.head_bytes();
  }
}

}  // namespace

void AppendRowsCpu(const PageLayout& layout, const RowAppend* appends, int32_t count,
                   ThreadPool* threads) {
  int64_t rows = 0;
  for (int32_t i = 0; i < count; ++i) rows += appends[i].rows;
  ForEach(count, rows * (layout.page_bytes() / kPageTokens), threads,
          [&](int i, int) { AppendRows(layout, appends[i]); });
}

void CopyPagesCpu(int64_t page_bytes, const PageCopy* copies, int32_t count, ThreadPool* threads) {
  ForEach(count, count * page_bytes, threads,
          [&](int i, int) { std::memcpy(copies[i].to, copies[i].from, page_bytes); });
}

}  // namespace flashcore::kernels
