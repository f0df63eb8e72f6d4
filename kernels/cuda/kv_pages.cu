#include <cuda_fp8.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/cuda_raii.h"
#include "kernels/cuda/element.cuh"
#include "kernels/fp8.h"
#include "kernels/half.h"
#include "kernels/kv_pages.h"

namespace flashcore::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWordBytes = 16;  // bytes that a thread copies at a time

// Bytes per block of a page copy: so few that even one page keeps the whole device busy.
constexpr int64_t kBlockBytes = 8 * kThreads * kWordBytes;

struct AppendParams {
  int64_t head_bytes;  // of a page; blockIdx.y is the KV head
  int64_t value_offset;
  int row_words;  // of a source row
};

// The parameters of a launch: with the appends, or with the place of more.
struct AppendsInParameters {
  AppendParams params;
  RowAppend appends[kAppendsInParameters];
};
struct AppendsInMemory {
  AppendParams params;
  const RowAppend* appends;
};

// blockIdx.y is the KV head.
template <class Arguments>
__global__ void __launch_bounds__(kThreads)
    AppendRowsKernel(const __grid_constant__ Arguments arguments) {
  const AppendParams& params = arguments.params;
  const RowAppend append = arguments.appends[blockIdx.x];
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

// The scale of a row of 8-bit K/V and the codes of its elements, as kernels/kv_8bit.h has them.
template <class Code, class Element>
__device__ __forceinline__ uint32_t ScaleOfRow(uint32_t largest) {
  using Traits = ElementTraits<Element>;
  constexpr float kLargestCode = std::is_same_v<Code, int8_t> ? 127 : kE4M3Max;
  if (largest >= Traits::kInfinity) return 0x7fc0;  // NaN
  const float scale = __fdiv_rn(Traits::Unpack(largest, 0), kLargestCode);
  const float most = __fdiv_rn(Traits::Unpack(Traits::kInfinity - 1, 0), kLargestCode);
  return min((__float_as_uint(scale) + 0xffff) >> 16, __float_as_uint(most) >> 16);
}

template <class Code>
__device__ __forceinline__ uint32_t CodeOf(float element, float scale) {
  if (!(scale > 0)) return 0;
  const float ratio = __fdiv_rn(element, scale);
  if constexpr (std::is_same_v<Code, int8_t>) {
    return __float_as_uint(__fadd_rn(fminf(fmaxf(ratio, -127), 127), kIntegerBase)) & 0xff;
  } else {
    return __nv_cvt_float_to_fp8(ratio, __NV_SATFINITE, __NV_E4M3);
  }
}

// To 8-bit pages. blockIdx.y is the KV head. A warp takes a row of K or of V, a lane up to 8
// elements of it.
template <class Code, class Element, class Arguments>
__global__ void __launch_bounds__(kThreads)
    Append8BitRowsKernel(const __grid_constant__ Arguments arguments) {
  const AppendParams& params = arguments.params;
  const RowAppend append = arguments.appends[blockIdx.x];
  const int lane = threadIdx.x % 32;
  const bool has_word = lane < params.row_words;
  for (int i = threadIdx.x / 32; i < 2 * append.rows; i += kThreads / 32) {
    const bool is_key = i < append.rows;
    const int row = is_key ? i : i - append.rows;
    const std::byte* from = (is_key ? append.key : append.value) + blockIdx.y * append.head_stride +
                            row * append.row_stride;
    uint4 word = make_uint4(0, 0, 0, 0);
    if (has_word) word = reinterpret_cast<const uint4*>(from)[lane];
    const uint32_t pairs[4] = {word.x, word.y, word.z, word.w};
    uint32_t largest = 0;
#pragma unroll
    for (const uint32_t pair : pairs) largest = __vmaxu2(largest, pair & 0x7fff7fffu);
    largest = __reduce_max_sync(0xffffffffu, max(largest & 0xffffu, largest >> 16));
    const uint32_t scale_bits = ScaleOfRow<Code, Element>(largest);
    const float scale = __uint_as_float(scale_bits << 16);
    uint32_t codes[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float element = ElementTraits<Element>::Unpack(pairs[n / 2], n % 2);
      codes[n / 4] |= CodeOf<Code>(element, scale) << 8 * (n % 4);
    }
    std::byte* const head =
        append.page + (is_key ? 0 : params.value_offset) + blockIdx.y * params.head_bytes;
    const int64_t row_bytes = params.row_words * int64_t{sizeof(uint2)};
    const int to_row = append.row + row;
    if (has_word) {
      reinterpret_cast<uint2*>(head + to_row * row_bytes)[lane] = make_uint2(codes[0], codes[1]);
    }
    if (lane == 0) {
      reinterpret_cast<uint16_t*>(head + kPageTokens * row_bytes)[to_row] =
          static_cast<uint16_t>(scale_bits);
    }
  }
}

// blockIdx.x is the page, blockIdx.y the part of kBlockBytes.
__global__ void __launch_bounds__(kThreads)
    CopyPagesKernel(int64_t page_bytes, const PageCopy* copies) {
  const PageCopy copy = copies[blockIdx.x];
  const int64_t begin = blockIdx.y * kBlockBytes;
  const int64_t end = min(begin + kBlockBytes, page_bytes);
  for (int64_t at = begin + threadIdx.x * kWordBytes; at < end; at += kThreads * kWordBytes) {
    *reinterpret_cast<uint4*>(copy.to + at) = *reinterpret_cast<const uint4*>(copy.from + at);
  }
}

dim3 PageGrid(int64_t page_bytes, int32_t count) {
  return dim3(count, static_cast<unsigned>((page_bytes + kBlockBytes - 1) / kBlockBytes));
}

template <class Arguments>
cudaError_t LaunchAppend(const PageLayout& layout, const Arguments& arguments, int32_t count,
                         void* stream) {
  const bool is_float16 = layout.dtype == DType::kFloat16;
  auto* kernel = AppendRowsKernel<Arguments>;
  if (layout.kv_dtype == KvDType::kFloat8E4M3) {
    kernel = is_float16 ? Append8BitRowsKernel<__nv_fp8_e4m3, __half, Arguments>
                        : Append8BitRowsKernel<__nv_fp8_e4m3, __nv_bfloat16, Arguments>;
  } else if (layout.kv_dtype == KvDType::kInt8) {
    kernel = is_float16 ? Append8BitRowsKernel<int8_t, __half, Arguments>
                        : Append8BitRowsKernel<int8_t, __nv_bfloat16, Arguments>;
  }
  return LaunchKernel(kernel, dim3(count, layout.num_kv_heads), kThreads, 0, stream, arguments);
}

}  // namespace

int AppendRowsCuda(const PageLayout& layout, const RowAppend* appends, int32_t count,
                   void* stream) {
  if (count == 0) return cudaSuccess;
  const int row_words = layout.head_dim * static_cast<int>(DTypeBytes(layout.dtype)) / kWordBytes;
  const AppendParams params{layout.head_bytes(), layout.value_offset(), row_words};
  if (count > kAppendsInParameters) {
    return LaunchAppend(layout, AppendsInMemory{params, appends}, count, stream);
  }
  AppendsInParameters arguments{params, {}};
  std::copy_n(appends, count, arguments.appends);
  return LaunchAppend(layout, arguments, count, stream);
}

int CopyPagesCuda(int64_t page_bytes, const PageCopy* copies, int32_t count, void* stream) {
  if (count == 0) return cudaSuccess;
  return LaunchKernel(CopyPagesKernel, PageGrid(page_bytes, count), kThreads, 0, stream, page_bytes,
                      copies);
}

}  // namespace flashcore::kernels
