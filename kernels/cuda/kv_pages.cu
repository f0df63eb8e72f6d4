#include <cuda_fp8.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/cuda_raii.h"
#include "kernels/cuda/element.cuh"
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

// Converts 16 bytes of a source row to the page's element type. A block has one KV head.
struct CopyWord {
  using Result = uint4;

  __device__ __forceinline__ explicit CopyWord(const float* /*scale*/) {}
  __device__ __forceinline__ Result operator()(uint4 word) const { return word; }
};

// To E4M3. Below sm_89 in software, with the same bits except the sign of NaN.
template <class Element>
struct QuantiseWord {
  using Result = uint2;

  __device__ __forceinline__ explicit QuantiseWord(const float* head_scales)
      : scale(head_scales[blockIdx.y]) {}

  __device__ __forceinline__ uint32_t Codes(uint32_t pair) const {
    const float2 values = make_float2(ElementTraits<Element>::Unpack(pair, 0) / scale,
                                      ElementTraits<Element>::Unpack(pair, 1) / scale);
    return __nv_cvt_float2_to_fp8x2(values, __NV_SATFINITE, __NV_E4M3);
  }
  __device__ __forceinline__ Result operator()(uint4 word) const {
    return make_uint2(Codes(word.x) | Codes(word.y) << 16, Codes(word.z) | Codes(word.w) << 16);
  }

  float scale;
};

template <class ConvertWord, class Arguments>
__global__ void __launch_bounds__(kThreads)
    AppendRowsKernel(const __grid_constant__ Arguments arguments) {
  using Result = typename ConvertWord::Result;
  const AppendParams& params = arguments.params;
  const RowAppend append = arguments.appends[blockIdx.x];
  const ConvertWord convert_key(append.key_scale);
  const ConvertWord convert_value(append.value_scale);
  const int64_t from = blockIdx.y * append.head_stride;
  auto* to = reinterpret_cast<Result*>(append.page + blockIdx.y * params.head_bytes);
  auto* value_to =
      reinterpret_cast<Result*>(append.page + params.value_offset + blockIdx.y * params.head_bytes);
  for (int i = threadIdx.x; i < append.rows * params.row_words; i += kThreads) {
    const int row = i / params.row_words;
    const int word = i % params.row_words;
    const int64_t at = from + row * append.row_stride + word * kWordBytes;
    const int to_word = append.row * params.row_words + i;
    to[to_word] = convert_key(*reinterpret_cast<const uint4*>(append.key + at));
    value_to[to_word] = convert_value(*reinterpret_cast<const uint4*>(append.value + at));
  }
}

// The scale of a row of INT8, as kernels/int8.h has it.
template <class Element>
__device__ __forceinline__ uint32_t Int8Scale(uint32_t largest) {
  constexpr uint32_t kInfinity = std::is_same_v<Element, __half> ? 0x7c00 : 0x7f80;
  if (largest >= kInfinity) return 0x7fc0;  // NaN
  const float scale = __fdiv_rn(ElementTraits<Element>::Unpack(largest, 0), 127);
  return (__float_as_uint(scale) + 0xffff) >> 16;
}

__device__ __forceinline__ uint32_t Int8Code(float element, float scale) {
  constexpr float kMagic = 12582912;  // rounds to an integer, in the lower bits
  if (!(scale > 0)) return 0;
  return __float_as_uint(__fadd_rn(__fdiv_rn(element, scale), kMagic)) & 0xff;
}

// To INT8. blockIdx.y is the KV head. A warp takes a row of K or of V, a lane up to 8 elements of
// it.
template <class Element, class Arguments>
__global__ void __launch_bounds__(kThreads)
    AppendInt8RowsKernel(const __grid_constant__ Arguments arguments) {
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
    const uint32_t scale_bits = Int8Scale<Element>(largest);
    const float scale = __uint_as_float(scale_bits << 16);
    uint32_t codes[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float element = ElementTraits<Element>::Unpack(pairs[n / 2], n % 2);
      codes[n / 4] |= Int8Code(element, scale) << 8 * (n % 4);
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
  auto* kernel = AppendRowsKernel<CopyWord, Arguments>;
  if (layout.kv_dtype == KvDType::kFloat8E4M3) {
    kernel = is_float16 ? AppendRowsKernel<QuantiseWord<__half>, Arguments>
                        : AppendRowsKernel<QuantiseWord<__nv_bfloat16>, Arguments>;
  } else if (layout.kv_dtype == KvDType::kInt8) {
    kernel = is_float16 ? AppendInt8RowsKernel<__half, Arguments>
                        : AppendInt8RowsKernel<__nv_bfloat16, Arguments>;
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
