// Online softmax over the scores of one tile, in registers.
#ifndef FLASHCORE_KERNELS_SM80_SOFTMAX_CUH_
#define FLASHCORE_KERNELS_SM80_SOFTMAX_CUH_

#include <cmath>
#include <type_traits>

#include "kernels/sm80/config.cuh"
#include "kernels/smxx/element.cuh"
#include "kernels/smxx/row_output.cuh"

namespace flashcore::kernels::sm80 {

// A span's softmax_scale, made positive: a negative one is a positive one of -Q, and 0 is as good
// as anything that takes every finite score to 0 (and leaves -infinity, which is masked, as it is).
struct SoftmaxScale {
  __device__ __forceinline__ explicit SoftmaxScale(float softmax_scale)
      : log2(fmaxf(fabsf(softmax_scale) * 1.44269504088896340736f, 1e-37f)) {}  // log2(e)

  // A score as a power of 2.
  __device__ __forceinline__ float Exponent(float score) const { return __fmul_rn(score, log2); }

  // Probabilities are kept relative to 2^Base(max).
  __device__ __forceinline__ float Base(float max) const {
    return max == -INFINITY ? 0.0f : Exponent(max);
  }

  // The output is rescaled only when the largest score has grown by more than a factor of 2^kSlack
  // in probability (Zadouri et al., FlashAttention-4, 2025): probabilities up to 2^kSlack do as
  // well until then, and most tiles need no rescaling at all. Float16 sums of probabilities up to
  // 2^8 would overflow 2^8 times as early.
  template <class Sum>
  static constexpr float kSlack = std::is_same_v<Sum, float> ? 8 : 0;

  // kSlack, as a score. Worked out again each time, because registers are scarcer than that.
  template <class Sum>
  __device__ __forceinline__ float Slack() const {
    float inverse;
    asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(log2));
    return kSlack<Sum> * inverse;
  }

  float log2;  // takes scores to powers of 2
};

// The largest value among the 4 lanes that share a row.
__device__ __forceinline__ float MaxOfRow(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

__device__ __forceinline__ float SumOfRow(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// Brings every row whose largest new score is out of reach of its maximum up to that score. A row
// decides for itself, so that its bits do not depend on its neighbours.
template <class C>
__device__ __forceinline__ void Rescale(const SoftmaxScale& scale, float slack,
                                        const float (&largest)[C::kRowTiles][2], State<C>* state) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float before = state->max[m][i];
      const float largest_of_row = MaxOfRow(largest[m][i]);
      const float max = largest_of_row > before + slack ? largest_of_row : before;
      const float factor = Exp2(scale.Exponent(before) - scale.Base(max));  // 0 at first
#pragma unroll
      for (int n = 0; n < C::kOutputTiles; ++n) state->output[m][n].ScaleRow(i, factor);
      state->rounded_sum[m][2 * i] *= factor;
      state->sum[m][i] *= factor;
      state->max[m][i] = max;
    }
  }
}

// A tile's probabilities as operands of P V. The accumulators of Q K^T are laid out as these need
// them: a pair of tiles of 8 tokens is one operand of 16.
template <class C>
struct Probabilities {
  uint32_t rows[C::kRowTiles][C::kTileTokens / 16][4];
};

// Brings the maxima up to a tile's scores, and the output with them, before P V is added to it.
template <class C>
__device__ __forceinline__ void RaiseMaxima(const SoftmaxScale& scale,
                                            const float (&scores)[C::kRowTiles][C::kScoreTiles][4],
                                            State<C>* state) {
  float largest[C::kRowTiles][2];
  const float slack = scale.Slack<typename C::Sum>();
  bool out_of_reach = false;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float value = fmaxf(scores[m][0][2 * i], scores[m][0][2 * i + 1]);
#pragma unroll
      for (int n = 1; n < C::kScoreTiles; ++n) {
        value = fmaxf(value, fmaxf(scores[m][n][2 * i], scores[m][n][2 * i + 1]));
      }
      largest[m][i] = value;
      out_of_reach |= value > state->max[m][i] + slack;
    }
  }
  if (__any_sync(0xffffffffu, out_of_reach)) Rescale<C>(scale, slack, largest, state);
}

// Turns a tile's scores into probabilities.
template <class C>
__device__ __forceinline__ void ComputeProbabilities(
    const SoftmaxScale& scale, const float (&scores)[C::kRowTiles][C::kScoreTiles][4],
    State<C>* state, Probabilities<C>* probabilities) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float base = scale.Base(state->max[m][i]);
#pragma unroll
      for (int n = 0; n < C::kScoreTiles; ++n) {
        const float first = Exp2(fmaf(scores[m][n][2 * i], scale.log2, -base));
        const float second = Exp2(fmaf(scores[m][n][2 * i + 1], scale.log2, -base));
        state->sum[m][i] += first + second;
        probabilities->rows[m][n / 2][n % 2 * 2 + i] =
            ElementTraits<typename C::Element>::Pack(first, second);
      }
    }
  }
}

// Makes each row's sum that of all its lanes, and its output relative to that sum. The output was
// made of rounded probabilities, whose own sum divides it without the error of rounding them; the
// sum of the others is what the LSE needs.
template <class C>
__device__ __forceinline__ void FinishSoftmax(State<C>* state) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& sum = state->sum[m][i];
      sum = SumOfRow(sum);
      const float factor = sum * InverseOfSum(state->rounded_sum[m][2 * i]);
#pragma unroll
      for (int n = 0; n < C::kOutputTiles; ++n) state->output[m][n].ScaleRow(i, factor);
    }
  }
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_SOFTMAX_CUH_
