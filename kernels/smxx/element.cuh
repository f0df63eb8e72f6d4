// The two 16-bit element types, as device code sees them.
#ifndef FLASHCORE_KERNELS_SMXX_ELEMENT_CUH_
#define FLASHCORE_KERNELS_SMXX_ELEMENT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace flashcore::kernels {

template <class Element>
struct ElementTraits;

template <>
struct ElementTraits<__half> {
  static constexpr uint32_t kOnes = 0x3c003c00;  // two elements of 1

  // Two elements in one register, `low` in the lower half, which is first in memory.
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

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SMXX_ELEMENT_CUH_
