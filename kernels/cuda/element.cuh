// Element types in device code: float16, bfloat16, and the codes of 8-bit K/V
// (kernels/kv_8bit.h).
#ifndef FLASHCORE_KERNELS_CUDA_ELEMENT_CUH_
#define FLASHCORE_KERNELS_CUDA_ELEMENT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cstring>

namespace flashcore::kernels {

template <class Element>
struct ElementTraits;

template <>
struct ElementTraits<__half> {
  static constexpr uint32_t kOnes = 0x3c003c00;  // two elements of 1
  static constexpr uint32_t kInfinity = 0x7c00;

  // Two elements in one register. `low` is in the lower half, first in memory.
  static __device__ __forceinline__ uint32_t Pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
  }

  // The lower (0) or upper (1) element of `pair`.
  static __device__ __forceinline__ float Unpack(uint32_t pair, int which) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16 * which)));
  }
};

template <>
struct ElementTraits<__nv_bfloat16> {
  static constexpr uint32_t kOnes = 0x3f803f80;
  static constexpr uint32_t kInfinity = 0x7f80;

  static __device__ __forceinline__ uint32_t Pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
  }

  static __device__ __forceinline__ float Unpack(uint32_t pair, int which) {
    return __bfloat162float(__ushort_as_bfloat16(static_cast<unsigned short>(pair >> 16 * which)));
  }
};

// Converts four codes of 8 bits to two pairs of elements: the first two and the last two, or if
// `alternate` the first and third, and the second and fourth. Exact; codes are not NaN and not
// -128.
template <class Code, class Element>
__device__ __forceinline__ void CodePairs(uint32_t codes, bool alternate, uint32_t (&pairs)[2]);

template <>
__device__ __forceinline__ void CodePairs<int8_t, __half>(uint32_t codes, bool alternate,
                                                          uint32_t (&pairs)[2]) {
  // The byte code + 128 in the lower half of 0x6400 is the float16 1024 + 128 + code.
  codes ^= 0x80808080u;
  const uint32_t biased[2] = {__byte_perm(codes, 0x64646464u, alternate ? 0x4240 : 0x4140),
                              __byte_perm(codes, 0x64646464u, alternate ? 0x4341 : 0x4342)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    __half2 pair;
    memcpy(&pair, &biased[i], sizeof(pair));
    pair = __hsub2(pair, __float2half2_rn(1024 + 128));
    memcpy(&pairs[i], &pair, sizeof(pair));
  }
}

// The codes of pair i in the upper bytes of its halves.
__device__ __forceinline__ uint32_t UpperBytes(uint32_t codes, int i, bool alternate) {
  if (alternate) return __byte_perm(codes, 0, i == 0 ? 0x2404 : 0x3414);
  return __byte_perm(codes, 0, i == 0 ? 0x1404 : 0x3424);
}

// With the exponent bias of float16 (15, not 7), a code has 2^-8 of its value, with that of
// bfloat16 (127) 2^-120, subnormals included. Below sm_89 there is no instruction for float16, and
// nowhere one for bfloat16.
template <>
__device__ __forceinline__ void CodePairs<__nv_fp8_e4m3, __half>(uint32_t codes, bool alternate,
                                                                 uint32_t (&pairs)[2]) {
#if __CUDA_ARCH__ >= 890
  if (alternate) codes = __byte_perm(codes, 0, 0x3120);
#endif
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#if __CUDA_ARCH__ < 890
    const uint32_t spread = UpperBytes(codes, i, alternate);
    const uint32_t bits = (spread & 0x80008000u) | (spread >> 1 & 0x3f803f80u);
    __half2 pair;
    memcpy(&pair, &bits, sizeof(pair));
    pair = __hmul2(pair, __float2half2_rn(256));
#else
    const __half2_raw pair =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes >> 16 * i), __NV_E4M3);
#endif
    memcpy(&pairs[i], &pair, sizeof(pair));
  }
}

template <>
__device__ __forceinline__ void CodePairs<__nv_fp8_e4m3, __nv_bfloat16>(uint32_t codes,
                                                                        bool alternate,
                                                                        uint32_t (&pairs)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t spread = UpperBytes(codes, i, alternate);
    const uint32_t bits = (spread & 0x80008000u) | (spread >> 4 & 0x07f007f0u);
    __nv_bfloat162 pair;
    memcpy(&pair, &bits, sizeof(pair));
    pair = __hmul2(pair, __float2bfloat162_rn(0x1p120f));
    memcpy(&pairs[i], &pair, sizeof(pair));
  }
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CUDA_ELEMENT_CUH_
