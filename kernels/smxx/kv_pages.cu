#include "kernels/kv_pages.h"
#include "kernels/smxx/launch.cuh"

namespace flashcore::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWordBytes = 16;  // what a thread moves at a time

// What a block moves of a page copy: enough of them to fill the device even for a single page.
constexpr int64_t kBlockBytes = 8 * kThreads * kWordBytes;

struct AppendParams {
  const RowAppend* appends;  // one per block in x
  int64_t head_bytes;        // of the page; a KV head per block in y
  int64_t value_offset;
  int row_words;
};

__global__ void __launch_bounds__(kThreads) AppendRowsKernel(const AppendParams params) {
  const RowAppend append = params.appends[blockIdx.x];
  const int64_t from = blockIdx.y * append.head_stride;
  auto* to = reinterpret_cast<uint4*>(append.page + blockIdx.y * params.head_bytes);
  auto* value_to =
      reinterpret_cast<uint4*>(append.page + params.value_offset + blockIdx.y * params.head_bytes);
  for (int i = threadIdx.x; i < append.rows * params.row_words; i += kThreads) {
    const int row = i / params.row_words;
    const int word = i % params.row_words;
    const int64_t at = from + row * append.row_stride + word * kWordBytes;
    const int to_word = append.row * params.row_words + i;
    to[to_word] = *reinterpret_cast<const uint4*>(append.key + at);
    value_to[to_word] = *reinterpret_cast<const uint4*>(append.value + at);
  }
}

// A page per block in x, kBlockBytes of it per block in y.
__global__ void __launch_bounds__(kThreads)
    CopyPagesKernel(int64_t page_bytes, const PageCopy* copies) {
  const PageCopy copy = copies[blockIdx.x];
  const int64_t begin = blockIdx.y * kBlockBytes;
  const int64_t end = min(begin + kBlockBytes, page_bytes);
  for (int64_t at = begin + threadIdx.x * kWordBytes; at < end; at += kThreads * kWordBytes) {
    *reinterpret_cast<uint4*>(copy.to + at) = *reinterpret_cast<const uint4*>(copy.from + at);
  }
}

}  // namespace

int AppendRowsCuda(const PageLayout& layout, const RowAppend* appends, int32_t count,
                   void* stream) {
  if (count == 0) return cudaSuccess;
  const AppendParams params{appends, layout.head_bytes(), layout.value_offset(),
                            static_cast<int>(layout.row_bytes() / kWordBytes)};
  return LaunchKernel(AppendRowsKernel, dim3(count, layout.num_kv_heads), kThreads, 0, stream,
                      params);
}

int CopyPagesCuda(int64_t page_bytes, const PageCopy* copies, int32_t count, void* stream) {
  if (count == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((page_bytes + kBlockBytes - 1) / kBlockBytes);
  return LaunchKernel(CopyPagesKernel, dim3(count, blocks), kThreads, 0, stream, page_bytes,
                      copies);
}

}  // namespace flashcore::kernels
