// Element types in device code: float16, bfloat16, E4M3 (kernels/fp8.h) and INT8 (kernels/int8.h).
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

#if __CUDA_ARCH__ < 890
// Converts the E4M3 codes in the upper bytes of the two halves. The same result as the instruction
// of sm_89.
__device__ __forceinline__ __half2 E4M3InUpperBytes(uint32_t codes) {
  // Read as float16, whose exponent bias is 15 instead of 7, a code has 2^-8 of its value,
  // subnormals included.
  const uint32_t bits = (codes & 0x80008000u) | (codes >> 1 & 0x3f803f80u);
  __half2 small;
  memcpy(&small, &bits, sizeof(small));
  // NaN has the code of 480. 2^-8 of 480 times 35840 is infinite, and 0 times that adds NaN to the
  // result. 2^-8 of 448, the largest finite value, times 35840 is finite and adds 0.
  const __half2 infinite_if_nan = __hmul2(small, __float2half2_rn(35840));
  return __hfma2(infinite_if_nan, __float2half2_rn(0), __hmul2(small, __float2half2_rn(256)));
}
#endif

// Converts four E4M3 codes to two pairs of float16. Exact; NaN stays NaN.
__device__ __forceinline__ void E4M3ToFloat16(uint32_t codes, uint32_t (&pairs)[2]) {
#if __CUDA_ARCH__ < 890
  const __half2 low = E4M3InUpperBytes(__byte_perm(codes, 0, 0x1404));
  const __half2 high = E4M3InUpperBytes(__byte_perm(codes, 0, 0x3424));
#else
  const __half2_raw low =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  const __half2_raw high =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes >> 16), __NV_E4M3);
#endif
  memcpy(&pairs[0], &low, sizeof(low));
  memcpy(&pairs[1], &high, sizeof(high));
}

// Converts four INT8 codes, in [-127, 127], to two pairs of elements. Exact.
template <class Element>
__device__ __forceinline__ void Int8ToElements(uint32_t codes, uint32_t (&pairs)[2]);

template <>
__device__ __forceinline__ void Int8ToElements<__half>(uint32_t codes, uint32_t (&pairs)[2]) {
  // The byte code + 128 in the lower half of 0x6400 is the float16 1024 + 128 + code.
  codes ^= 0x80808080u;
  const uint32_t biased[2] = {__byte_perm(codes, 0x64646464u, 0x4140),
                              __byte_perm(codes, 0x64646464u, 0x4342)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    __half2 pair;
    memcpy(&pair, &biased[i], sizeof(pair));
    pair = __hsub2(pair, __float2half2_rn(1024 + 128));
    memcpy(&pairs[i], &pair, sizeof(pair));
  }
}

template <>
__device__ __forceinline__ void Int8ToElements<__nv_bfloat16>(uint32_t codes,
                                                              uint32_t (&pairs)[2]) {
  // 0x4300 is 128, with 7 bits of mantissa. The lower 7 bits of a code in them are 128 + (code
  // modulo 128), and a set sign bit alone makes 128 the 256 that is to be subtracted.
  const uint32_t spread[2] = {__byte_perm(codes, 0x43434343u, 0x4140),
                              __byte_perm(codes, 0x43434343u, 0x4342)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t magnitude_bits = spread[i] & 0xff7fff7fu;
    const uint32_t sign_bits = spread[i] & 0xff80ff80u;
    __nv_bfloat162 magnitude, sign;
    memcpy(&magnitude, &magnitude_bits, sizeof(magnitude));
    memcpy(&sign, &sign_bits, sizeof(sign));
    const __nv_bfloat162 pair = __hsub2(magnitude, sign);
    memcpy(&pairs[i], &pair, sizeof(pair));
  }
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CUDA_ELEMENT_CUH_
