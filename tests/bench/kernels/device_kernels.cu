#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "kernels/fp8.h"
#include "tests/bench/kernels/device_kernels.h"

namespace flashcore::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kFillBlocks = 1024;

// The 64-bit finaliser of MurmurHash3, a bijection.
__device__ uint64_t Mix(uint64_t bits) {
  bits = (bits ^ bits >> 33) * 0xff51afd7ed558ccdu;
  bits = (bits ^ bits >> 33) * 0xc4ceb9fe1a85ec53u;
  return bits ^ bits >> 33;
}

__device__ void Store(float value, __half* to) { *to = __float2half_rn(value); }
__device__ void Store(float value, __nv_bfloat16* to) { *to = __float2bfloat16_rn(value); }

// The code of a number from -1 to 1, with a scale of 1 / 127 or 1 / 448.
__device__ uint32_t CodeOf(float value, int8_t /*type*/) {
  return static_cast<uint8_t>(__float2int_rn(value * 127));
}
__device__ uint32_t CodeOf(float value, __nv_fp8_e4m3 /*type*/) {
  return __nv_cvt_float_to_fp8(value * kE4M3Max, __NV_SATFINITE, __NV_E4M3);
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    FillUniformKernel(uint32_t seed, size_t count, Element* elements) {
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const auto bits = static_cast<int32_t>(Mix(uint64_t{seed} << 40 ^ i) >> 32);
    Store(static_cast<float>(bits) * 0x1p-31f, elements + i);
  }
}

template <class Element>
cudaError_t Fill(uint32_t seed, size_t count, void* elements, cudaStream_t stream) {
  FillUniformKernel<<<kFillBlocks, kThreads, 0, stream>>>(seed, count,
                                                          static_cast<Element*>(elements));
  return cudaGetLastError();
}

// In units of two bytes, a head of a page has `codes` of two codes each, and then scales, from
// `least_scale` to 1.5 times that.
template <class Code>
__global__ void __launch_bounds__(kThreads)
    Fill8BitPagesKernel(uint32_t seed, int codes, int head, uint32_t least_scale, size_t count,
                        uint16_t* pages) {
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const auto bits = static_cast<uint32_t>(Mix(uint64_t{seed} << 40 ^ i) >> 32);
    const auto low = static_cast<int16_t>(bits), high = static_cast<int16_t>(bits >> 16);
    const bool is_scale = static_cast<int>(i % head) >= codes;
    pages[i] = static_cast<uint16_t>(is_scale ? least_scale | (bits & 0x3f)
                                              : CodeOf(low * 0x1p-15f, Code()) |
                                                    CodeOf(high * 0x1p-15f, Code()) << 8);
  }
}

// Independent sums of a warp, enough to hide the latency of an mma.
constexpr int kChains = 8;
constexpr int kSpinSteps = 16384;
constexpr int kSpinBlocksPerSm = 2;
constexpr double kMmaFlops = 2.0 * 16 * 8 * 16;

__device__ __forceinline__ void Mma(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two float16 with random sign and mantissa and magnitude 1/16 to 1/8. Random data draws as much
// power as real data; zeros would run at a higher clock.
__device__ uint32_t SmallHalves(uint32_t seed) {
  return (static_cast<uint32_t>(Mix(seed + 1)) & 0x83ff83ffu) | 0x2c002c00u;
}

__global__ void __launch_bounds__(kThreads, kSpinBlocksPerSm) SpinTensorCoresKernel(float* sink) {
  uint32_t a[4], b[kChains][2];
  float c[kChains][4] = {};
  for (int i = 0; i < 4; ++i) a[i] = SmallHalves(threadIdx.x * 4 + i);
#pragma unroll
  for (int chain = 0; chain < kChains; ++chain) {
    for (int i = 0; i < 2; ++i) b[chain][i] = SmallHalves((threadIdx.x + chain * kThreads) * 2 + i);
  }
#pragma unroll 1
  for (int step = 0; step < kSpinSteps; ++step) {
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) Mma(a, b[chain], c[chain]);
  }
  float sum = 0;
#pragma unroll
  for (int chain = 0; chain < kChains; ++chain) {
    for (float element : c[chain]) sum += element;
  }
  if (sum == 1.5e30f) *sink = sum;  // never true: keeps the compiler from removing the loop
}

}  // namespace

cudaError_t FillUniform(DType dtype, uint32_t seed, size_t count, void* elements,
                        cudaStream_t stream) {
  return dtype == DType::kFloat16 ? Fill<__half>(seed, count, elements, stream)
                                  : Fill<__nv_bfloat16>(seed, count, elements, stream);
}

cudaError_t Fill8BitPages(KvDType kv_dtype, uint32_t seed, int32_t head_dim, size_t bytes,
                          void* pages, cudaStream_t stream) {
  const bool is_int8 = kv_dtype == KvDType::kInt8;
  const auto kernel = is_int8 ? Fill8BitPagesKernel<int8_t> : Fill8BitPagesKernel<__nv_fp8_e4m3>;
  kernel<<<kFillBlocks, kThreads, 0, stream>>>(
      seed, kPageTokens * head_dim / 2, kPageTokens * (head_dim + 2) / 2,
      is_int8 ? 0x3c00 : 0x3b00,  // 1/128, 1/512
      bytes / sizeof(uint16_t), static_cast<uint16_t*>(pages));
  return cudaGetLastError();
}

cudaError_t SpinTensorCores(int multiprocessors, float* sink, cudaStream_t stream, double* flops) {
  const int blocks = multiprocessors * kSpinBlocksPerSm;
  *flops = kMmaFlops * kChains * kSpinSteps * (kThreads / 32) * blocks;
  SpinTensorCoresKernel<<<blocks, kThreads, 0, stream>>>(sink);
  return cudaGetLastError();
}

}  // namespace flashcore::kernels
