// Q as INT8 codes, for Q K^T with K's codes as they are.
#ifndef FLASHCORE_KERNELS_SM80_QUERY_CODES_CUH_
#define FLASHCORE_KERNELS_SM80_QUERY_CODES_CUH_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/work_list.h"
#include "kernels/sm80/score_scale.cuh"
#include "kernels/sm80/shared_tile.cuh"

namespace flashcore::kernels::sm80 {

// Replaces the rows of the Q tile in shared memory by codes, the bytes of a row's higher (or only)
// halves and then those of its lower halves, and writes each row's factor, which makes a score of a
// sum of products of codes, and an exponent of 2 but for the scale of K's row. An element x of a
// row whose largest magnitude is m becomes the integer nearest to x * 32512 / m = 256 * higher +
// lower, or with one part to x * 127 / m. Rows with m below 2^-110 have fewer bits. A row with NaN
// or infinity has factor NaN.
template <class C>
__device__ __forceinline__ void QuantiseQuery(const Work& work, std::byte* tile, float* factors) {
  using Traits = ElementTraits<typename C::Element>;
  constexpr int kChunks = C::kQueryRowBytes / 16;  // of a row, a lane for each
  constexpr float kLargest = C::kQueryParts == 2 ? 127 * 256 : 127;
  constexpr float kLeast = 0x1p-110f;  // whose inverse is a float
  static_assert(32 % kChunks == 0);
  const auto chunk_at = [&](int row, int chunk) {
    return tile + StepOffset<C::kQueryRowBytes>(row, chunk / 2, chunk % 2);
  };
#pragma unroll 1
  for (int index = threadIdx.x; index < C::kRows * kChunks; index += C::kThreads) {
    const int row = index / kChunks;
    const int chunk = index % kChunks;
    const uint4 elements = *reinterpret_cast<const uint4*>(chunk_at(row, chunk));
    const uint32_t pairs[4] = {elements.x, elements.y, elements.z, elements.w};
    uint32_t largest = 0;  // bits without the sign: as integers they are in the order of magnitudes
#pragma unroll
    for (const uint32_t pair : pairs) {
      largest = max(largest, max(pair & 0x7fffu, pair >> 16 & 0x7fffu));
    }
#pragma unroll
    for (int lanes = kChunks / 2; lanes > 0; lanes /= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    }
    const float magnitude = fmaxf(Traits::Unpack(largest, 0), kLeast);  // kLeast for NaN
    const float inverse = copysignf(kLargest / magnitude, work.span.softmax_scale);
    uint32_t codes[2][2] = {};  // [part], four each
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int number = __float2int_rn(Traits::Unpack(pairs[n / 2], n % 2) * inverse);
      const int higher = C::kQueryParts == 2 ? (number + 128) >> 8 : number;
      codes[0][n / 4] |= (higher & 0xff) << n % 4 * 8;
      if constexpr (C::kQueryParts == 2) codes[1][n / 4] |= (number & 0xff) << n % 4 * 8;
    }
    // All lanes of the row have read it: each took part in the shuffles.
#pragma unroll
    for (int part = 0; part < C::kQueryParts; ++part) {
      *reinterpret_cast<uint2*>(chunk_at(row, part * kChunks / 2 + chunk / 2) + chunk % 2 * 8) =
          make_uint2(codes[part][0], codes[part][1]);
    }
    if (chunk == 0) {
      const bool finite = largest < Traits::kInfinity;
      const float factor = magnitude * (1 / kLargest) * (fabsf(work.span.softmax_scale) * kLog2E);
      factors[row] = finite ? factor : NAN;
    }
  }
  __syncthreads();
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_QUERY_CODES_CUH_
