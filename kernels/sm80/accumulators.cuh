// What a warp sums products in.
#ifndef FLASHCORE_KERNELS_SM80_ACCUMULATORS_CUH_
#define FLASHCORE_KERNELS_SM80_ACCUMULATORS_CUH_

#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "kernels/smxx/element.cuh"

namespace flashcore::kernels::sm80 {

// A lane's four sums of a tile of 16 rows x 8 columns, laid out as MultiplyAdd has them: of the
// lane's row i (0 or 1), sums 2 * i and 2 * i + 1.
template <class Sum>
struct Accumulators;

template <>
struct Accumulators<float> {
  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[c] = 0;
  }
  __device__ __forceinline__ float Get(int c) const { return sums[c]; }
  __device__ __forceinline__ void ScaleRow(int i, float factor) {
    sums[2 * i] *= factor;
    sums[2 * i + 1] *= factor;
  }

  float sums[4];
};

// Half the registers. A sum beyond 65504 is infinite.
template <>
struct Accumulators<__half> {
  __device__ __forceinline__ void Clear() { sums[0] = sums[1] = 0; }
  __device__ __forceinline__ float Get(int c) const {
    return ElementTraits<__half>::Unpack(sums[c / 2], c % 2);
  }
  __device__ __forceinline__ void ScaleRow(int i, float factor) {
    __half2 pair;
    memcpy(&pair, &sums[i], sizeof(pair));
    pair = __hmul2(pair, __float2half2_rn(factor));
    memcpy(&sums[i], &pair, sizeof(pair));
  }

  uint32_t sums[2];  // pairs
};

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_ACCUMULATORS_CUH_
