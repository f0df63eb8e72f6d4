// Accumulators of mma, and the online-softmax state that a warp keeps of its rows.
#ifndef FLASHCORE_KERNELS_SM80_ACCUMULATORS_CUH_
#define FLASHCORE_KERNELS_SM80_ACCUMULATORS_CUH_

#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cuda/element.cuh"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/thread.cuh"

namespace flashcore::kernels::sm80 {

// A lane's four accumulators of a tile, in the layout of Mma (ptx.cuh). Which are of its row i (0
// or 1), says AccumulatorAt.
template <class Accum>
struct Accumulators;

template <>
struct Accumulators<float> {
  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[c] = 0;
  }
  __device__ __forceinline__ float Get(int c) const { return sums[c]; }
  template <class C>
  __device__ __forceinline__ void ScaleRow(int i, float factor) {
    sums[AccumulatorAt<C>(i, 0)] *= factor;
    sums[AccumulatorAt<C>(i, 1)] *= factor;
  }

  float sums[4];
};

// Half the registers; overflows beyond 65504.
template <>
struct Accumulators<__half> {
  __device__ __forceinline__ void Clear() { sums[0] = sums[1] = 0; }
  __device__ __forceinline__ float Get(int c) const {
    return ElementTraits<__half>::Unpack(sums[c / 2], c % 2);
  }
  template <class C>
  __device__ __forceinline__ void ScaleRow(int i, float factor) {
    static_assert(!C::kTransposed);
    __half2 pair;
    memcpy(&pair, &sums[i], sizeof(pair));
    pair = __hmul2(pair, __float2half2_rn(factor));
    memcpy(&sums[i], &pair, sizeof(pair));
  }

  uint32_t sums[2];  // two float16 each
};

template <class Accum>
__device__ __forceinline__ float4 AsFloat4(const Accumulators<Accum>& tile) {
  return make_float4(tile.Get(0), tile.Get(1), tile.Get(2), tile.Get(3));
}

// The attention of a warp's rows over some K/V rows, as one lane holds it: [m] is the row tile, [i]
// the lane's row in it (ThreadPosition::Row), [n] the output tile. Empty at first.
template <class C, class Accum>
struct RowSums {
  Accumulators<Accum> output[C::kRowTiles][C::kOutputTiles];  // relative to 2^Base(max)
  float max[C::kRowTiles][2];  // row max to within the rescale threshold; same in the row's lanes
  float sum[C::kRowTiles][2];  // of all lanes; until FinishSoftmax of this lane's probabilities

  __device__ __forceinline__ RowSums() {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < C::kOutputTiles; ++n) output[m][n].Clear();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        max[m][i] = -INFINITY;
        sum[m][i] = 0;
      }
    }
  }
};

// The online-softmax state of a warp's rows.
template <class C>
struct State : RowSums<C, typename C::Accum> {
  // Sum of all of the row's probabilities as P V uses them, rounded to Element: an mma of P and
  // ones, whose 8 columns are equal. Always float32: float16 cannot count beyond 2048. Not used
  // with kCodes.
  float rounded_sum[C::kRowTiles][4];
  // With kFloatValueSums: what the output of each row has too much, kIntegerBase times the factors
  // of the tiles since SubtractBases.
  float bases[C::kRowTiles][2];
  // With kTwoSums: until FinishSoftmax the sum of odd tokens.
  float odd_sum[C::kRowTiles][2];

  __device__ __forceinline__ State() {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int c = 0; c < 4; ++c) rounded_sum[m][c] = 0;
      bases[m][0] = bases[m][1] = 0;
      odd_sum[m][0] = odd_sum[m][1] = 0;
    }
  }
};

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_ACCUMULATORS_CUH_
