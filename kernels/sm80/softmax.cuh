// Online softmax over the scores of one tile, in registers.
#ifndef FLASHCORE_KERNELS_SM80_SOFTMAX_CUH_
#define FLASHCORE_KERNELS_SM80_SOFTMAX_CUH_

#include <cmath>

#include "kernels/sm80/config.cuh"
#include "kernels/smxx/row_output.cuh"

namespace flashcore::kernels::sm80 {

// The largest value among the 4 lanes that share a row.
__device__ __forceinline__ float MaxOfRow(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

__device__ __forceinline__ float SumOfRow(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// Turns scores (base 2) into probabilities relative to the new maximum, and brings maximum, sum and
// output up to date.
template <class C>
__device__ __forceinline__ void UpdateSoftmax(float (&scores)[C::kScoreTiles][4], State<C>* state) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float max = state->max[i];
#pragma unroll
    for (int n = 0; n < C::kScoreTiles; ++n) {
      max = fmaxf(max, fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
    }
    max = MaxOfRow(max);
    const float base = SoftmaxBase(max);
    const float rescale = Exp2(state->max[i] - base);
    float sum = state->sum[i] * rescale;
#pragma unroll
    for (int n = 0; n < C::kScoreTiles; ++n) {
      scores[n][2 * i] = Exp2(scores[n][2 * i] - base);
      scores[n][2 * i + 1] = Exp2(scores[n][2 * i + 1] - base);
      sum += scores[n][2 * i] + scores[n][2 * i + 1];
    }
#pragma unroll
    for (int n = 0; n < C::kOutputTiles; ++n) {
      state->output[n][2 * i] *= rescale;
      state->output[n][2 * i + 1] *= rescale;
    }
    state->max[i] = max;
    state->sum[i] = sum;
  }
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_SOFTMAX_CUH_
