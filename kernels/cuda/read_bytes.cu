#include "kernels/cuda/cuda_raii.h"
#include "kernels/cuda/read_bytes.h"

namespace flashcore::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kThreadWords = 8;  // of 16 bytes, all in flight at once
constexpr size_t kBlockWords = size_t{kThreads} * kThreadWords;

// A sum that memory almost never has. Without the comparison the compiler would drop the reads.
constexpr uint32_t kUnlikely = 0x9e3779b9;

__global__ void __launch_bounds__(kThreads)
    ReadBytesKernel(const uint4* words, size_t count, uint32_t* sink) {
  const size_t begin = blockIdx.x * kBlockWords + threadIdx.x;
  uint4 read[kThreadWords];
#pragma unroll
  for (int i = 0; i < kThreadWords; ++i) {
    const size_t at = begin + size_t{kThreads} * i;
    read[i] = at < count ? words[at] : uint4{};
  }
  uint32_t sum = 0;
#pragma unroll
  for (const uint4& word : read) sum += word.x + word.y + word.z + word.w;
  if (sum == kUnlikely) *sink = sum;
}

}  // namespace

cudaError_t ReadBytes(const void* from, size_t bytes, uint32_t* sink, cudaStream_t stream) {
  const size_t count = bytes / sizeof(uint4);
  const auto blocks = static_cast<unsigned>((count + kBlockWords - 1) / kBlockWords);
  return LaunchKernel(ReadBytesKernel, dim3(blocks), kThreads, 0, stream,
                      static_cast<const uint4*>(from), count, sink);
}

}  // namespace flashcore::kernels
