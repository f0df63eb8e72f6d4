// Online softmax over the scores of one K/V tile, in registers.
#ifndef FLASHCORE_KERNELS_SM80_SOFTMAX_CUH_
#define FLASHCORE_KERNELS_SM80_SOFTMAX_CUH_

#include <cuda_fp16.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/row_output.cuh"
#include "kernels/sm80/accumulators.cuh"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/ptx.cuh"
#include "kernels/sm80/score_scale.cuh"
#include "kernels/sm80/thread.cuh"

namespace flashcore::kernels::sm80 {

// Reduces over the lanes that share a row: 4, which differ in their lowest bits, or with
// kTransposed 8, which differ in the others.
template <class C, class Reduce>
__device__ __forceinline__ float ReduceRow(float value, const Reduce& reduce) {
#pragma unroll
  for (int lanes = C::kTransposed ? 4 : 1; lanes < (C::kTransposed ? 32 : 4); lanes *= 2) {
    value = reduce(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  }
  return value;
}
template <class C>
__device__ __forceinline__ float MaxOfRow(float value) {
  return ReduceRow<C>(value, [](float a, float b) { return fmaxf(a, b); });
}
template <class C>
__device__ __forceinline__ float SumOfRow(float value) {
  return ReduceRow<C>(value, [](float a, float b) { return a + b; });
}

// Raises the max of each row whose largest new score exceeds it by more than the threshold, and
// rescales the row to it. Each row decides alone, so its bits do not depend on the other rows.
template <class C>
__device__ __forceinline__ void RescaleRows(const SoftmaxScale& scale, float threshold,
                                            const float (&largest)[C::kRowTiles][2],
                                            State<C>* state) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float before = state->max[m][i];
      const float largest_of_row = MaxOfRow<C>(largest[m][i]);
      const float max = largest_of_row > before + threshold ? largest_of_row : before;
      const float factor = Exp2(scale.Exponent(before) - scale.Base(max));  // 0 at first
#pragma unroll
      for (int n = 0; n < C::kOutputTiles; ++n) {
        state->output[m][n].template ScaleRow<C>(i, factor);
      }
      if constexpr (!C::kCodes) state->rounded_sum[m][2 * i] *= factor;
      if constexpr (C::kFloatValueSums) state->bases[m][i] *= factor;
      state->sum[m][i] *= factor;
      if constexpr (C::kTwoSums) state->odd_sum[m][i] *= factor;
      state->max[m][i] = max;
    }
  }
}

// A tile's probabilities as A operands of P V. Two accumulator tiles of Q K^T (8 tokens each) have
// the layout of one A operand of Elements (16 tokens), and four of one of codes. With kTransposed,
// they are B operands of V^T P^T, for which an accumulator tile (16 tokens) is transposed.
template <class C>
struct Probabilities {
  uint32_t rows[C::kRowTiles][C::kTileTokens / (C::kCodeValues ? 32 : 16)][C::kTransposed ? 2 : 4];
  float factors[C::kRowTiles][2];  // only with kCodeValues: of a row's codes
};

// Updates the row maxima for a tile's scores and rescales the output, before P V of the tile is
// added to it. `largest` receives the largest score of each row that the lane has.
template <class C>
__device__ __forceinline__ void UpdateRowMax(const SoftmaxScale& scale,
                                             const float (&scores)[C::kRowTiles][C::kScoreTiles][4],
                                             State<C>* state, float (&largest)[C::kRowTiles][2]) {
  const float threshold = scale.RescaleThreshold<typename C::Accum>();
  bool exceeds = false;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first = AccumulatorAt<C>(i, 0), second = AccumulatorAt<C>(i, 1);
      float value = fmaxf(scores[m][0][first], scores[m][0][second]);
#pragma unroll
      for (int n = 1; n < C::kScoreTiles; ++n) {
        value = fmaxf(value, fmaxf(scores[m][n][first], scores[m][n][second]));
      }
      largest[m][i] = value;
      exceeds |= value > state->max[m][i] + threshold;
    }
  }
  if (__any_sync(0xffffffffu, exceeds)) RescaleRows<C>(scale, threshold, largest, state);
}

// Two numbers from 0 to 255 as the integers 1024 + number in the low bytes of two float16.
__device__ __forceinline__ uint32_t CodesOf(float first, float second) {
  const __half2 codes =
      __hadd2(__floats2half2_rn(first, second), __half2half2(__ushort_as_half(0x6400)));
  uint32_t bits;
  memcpy(&bits, &codes, sizeof(bits));
  return bits;
}

// Turns a tile's scores, which are exponents, into probabilities of 8 bits: each row's largest
// becomes 255. `largest`: as UpdateRowMax has left it.
template <class C>
__device__ __forceinline__ void ComputeProbabilityCodes(
    const float (&scores)[C::kRowTiles][C::kScoreTiles][4], const float (&largest)[C::kRowTiles][2],
    const RowFactors<C>& factors, State<C>* state, Probabilities<C>* probabilities) {
  constexpr float kLog2Of255 = 7.99435343685885793768f;
  constexpr float kMasked = 0x1p100f;  // of a row without a token in the tile: its factor becomes 0
  float sums[C::kRowTiles][2] = {};
  float shift[C::kRowTiles][2];
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float of_row = MaxOfRow<C>(largest[m][i]);
      shift[m][i] = of_row == -INFINITY ? kMasked - FiniteOr0(state->max[m][i])  // spills without
                                        : kLog2Of255 - of_row;
    }
  }
#pragma unroll
  for (int n = 0; n < C::kScoreTiles; n += 2) {
    const float2 first = factors.OfSums(n), second = factors.OfSums(n + 1);
    const float inverse[4] = {first.x, first.y, second.x, second.y};
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t codes[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float even = Exp2(scores[m][n + c][2 * i] + shift[m][i]);
          const float odd = Exp2(scores[m][n + c][2 * i + 1] + shift[m][i]);
          sums[m][i] = fmaf(odd, inverse[2 * c + 1], fmaf(even, inverse[2 * c], sums[m][i]));
          codes[c] = CodesOf(even, odd);
        }
        probabilities->rows[m][n / 4][n % 4 / 2 * 2 + i] = __byte_perm(codes[0], codes[1], 0x6420);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      probabilities->factors[m][i] = Exp2(-shift[m][i] - FiniteOr0(state->max[m][i]));
      state->sum[m][i] = fmaf(sums[m][i], probabilities->factors[m][i], state->sum[m][i]);
    }
  }
}

// Turns a tile's scores into probabilities. `largest`: as UpdateRowMax has left it. `factors`:
// only with kCodes.
template <class C>
__device__ __forceinline__ void ComputeProbabilities(
    const SoftmaxScale& scale, const float (&scores)[C::kRowTiles][C::kScoreTiles][4],
    const float (&largest)[C::kRowTiles][2], const RowFactors<C>& factors, State<C>* state,
    Probabilities<C>* probabilities) {
  if constexpr (C::kCodeValues) {
    ComputeProbabilityCodes<C>(scores, largest, factors, state, probabilities);
    return;
  }
  const auto pack = [](float first, float second) {
    return ElementTraits<typename C::ValueElement>::Pack(first, second);
  };
  const auto compute = [&](int m, int i, int n, float base, float2 inverse) {
    const float first = Exp2(fmaf(scores[m][n][AccumulatorAt<C>(i, 0)], scale.log2, -base));
    const float second = Exp2(fmaf(scores[m][n][AccumulatorAt<C>(i, 1)], scale.log2, -base));
    float& sum = state->sum[m][i];
    if constexpr (!C::kCodes) {
      sum += first + second;
    } else {
      sum = fmaf(first, inverse.x, sum);
      float& sum_of_second = C::kTwoSums ? state->odd_sum[m][i] : sum;
      sum_of_second = fmaf(second, inverse.y, sum_of_second);
    }
    return make_float2(first, second);
  };
  if constexpr (C::kCodes) {
#pragma unroll
    for (int n = 0; n < C::kScoreTiles; ++n) {
      const float2 inverse = factors.OfSums(n);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        float2 pairs[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          pairs[i] = compute(m, i, n, scale.Base(state->max[m][i]), inverse);
          if constexpr (C::kTransposed) continue;
          probabilities->rows[m][n / 2][n % 2 * 2 + i] = pack(pairs[i].x, pairs[i].y);
        }
        if constexpr (C::kTransposed) {
          probabilities->rows[m][n][0] = TransposeMatrix(pack(pairs[0].x, pairs[1].x));
          probabilities->rows[m][n][1] = TransposeMatrix(pack(pairs[0].y, pairs[1].y));
        }
      }
    }
  } else {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float base = scale.Base(state->max[m][i]);
#pragma unroll
        for (int n = 0; n < C::kScoreTiles; ++n) {
          const float2 pair = compute(m, i, n, base, {});
          probabilities->rows[m][n / 2][n % 2 * 2 + i] = pack(pair.x, pair.y);
        }
      }
    }
  }
}

// Reduces each row's sum over its lanes, and makes the output relative to that sum. The output is
// a sum over rounded probabilities: dividing it by their own sum, and not by `sum`, cancels part of
// the rounding error. LSE needs the unrounded sum. With kCodes it is relative to that already.
template <class C>
__device__ __forceinline__ void FinishSoftmax(State<C>* state) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& sum = state->sum[m][i];
      if constexpr (C::kTwoSums) sum += state->odd_sum[m][i];
      sum = SumOfRow<C>(sum);
      if constexpr (C::kCodes) continue;
      const float factor = sum * InverseOfSum(state->rounded_sum[m][2 * i]);
#pragma unroll
      for (int n = 0; n < C::kOutputTiles; ++n) {
        state->output[m][n].template ScaleRow<C>(i, factor);
      }
    }
  }
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_SOFTMAX_CUH_
