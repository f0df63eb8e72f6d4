// FP8 E4M3 codes (kernels/fp8.h), as device code sees them.
#ifndef FLASHCORE_KERNELS_SMXX_E4M3_CUH_
#define FLASHCORE_KERNELS_SMXX_E4M3_CUH_

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cstring>

namespace flashcore::kernels {

#if __CUDA_ARCH__ < 890
// A code in the upper byte of each half: what the conversion of sm_89 gives.
__device__ __forceinline__ __half2 E4M3InUpperBytes(uint32_t codes) {
  // With float16's bias of 15 in place of 7 it is 2^-8 of its value, subnormals included.
  const uint32_t bits = (codes & 0x80008000u) | (codes >> 1 & 0x3f803f80u);
  __half2 small;
  memcpy(&small, &bits, sizeof(small));
  // 2^-8 of 448 stays finite when it is multiplied by 35840. NaN's code, which would be 480, does
  // not: times 0, that adds NaN.
  const __half2 infinite_if_nan = __hmul2(small, __float2half2_rn(35840));
  return __hfma2(infinite_if_nan, __float2half2_rn(0), __hmul2(small, __float2half2_rn(256)));
}
#endif

// Four codes as two pairs of float16, exactly; NaN stays NaN.
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

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SMXX_E4M3_CUH_
