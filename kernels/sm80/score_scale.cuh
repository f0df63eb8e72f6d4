// The factors of scores: softmax_scale, and the scales of 8-bit rows, of which each row of K, and
// of V, has one (kernels/kv_8bit.h).
//
// A score times the scale of its K row becomes the exponent x of the row's probability, 2^x. The
// scale v of its V row goes into it, too: P V adds w * code with w = 2^(x + log2(v) - max), and the
// sum of the probabilities adds w / v. So max is that of x + log2(v), and w is at most
// 2^kRescaleThreshold for a V of any magnitude; if V's scale multiplied P, small V would underflow
// in float16.
#ifndef FLASHCORE_KERNELS_SM80_SCORE_SCALE_CUH_
#define FLASHCORE_KERNELS_SM80_SCORE_SCALE_CUH_

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/row_output.cuh"
#include "kernels/cuda/work_list.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/ptx.cuh"

namespace flashcore::kernels::sm80 {

// The softmax scale as a positive factor. A negative scale becomes a positive one of -Q. Scale 0
// becomes a factor so small that every finite score rounds to exponent 0, but -infinity (masked)
// stays -infinity.
struct SoftmaxScale {
  __device__ __forceinline__ explicit SoftmaxScale(float softmax_scale)
      : log2(fmaxf(fabsf(softmax_scale) * 1.44269504088896340736f, 1e-37f)) {}  // log2(e)

  // Of scores that are exponents of 2.
  static __device__ __forceinline__ SoftmaxScale One() {
    SoftmaxScale one(0);
    one.log2 = 1;
    return one;
  }

  // The exponent of 2 of a score.
  __device__ __forceinline__ float Exponent(float score) const { return __fmul_rn(score, log2); }

  // Probabilities are stored relative to 2^Base(max).
  __device__ __forceinline__ float Base(float max) const {
    return max == -INFINITY ? 0.0f : Exponent(max);
  }

  // The output is rescaled only when a row's max would grow by more than 2^kRescaleThreshold in
  // probability (Zadouri et al., FlashAttention-4, 2025). Until then probabilities up to
  // 2^kRescaleThreshold are as exact, and most tiles need no rescaling. 0 for float16 accumulators,
  // which would overflow.
  template <class Accum>
  static constexpr float kRescaleThreshold = std::is_same_v<Accum, float> ? 8 : 0;

  // kRescaleThreshold in units of scores. Recomputed at each use to save a register.
  template <class Accum>
  __device__ __forceinline__ float RescaleThreshold() const {
    float inverse;
    asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(log2));
    return kRescaleThreshold<Accum> * inverse;
  }

  float log2;  // converts a score to an exponent of 2
};

// The lower (0) or upper (1) BFloat16 of a pair.
__device__ __forceinline__ float UnpackScale(uint32_t pair, int which) {
  return __uint_as_float(which == 0 ? pair << 16 : pair & 0xffff0000u);
}

// V's scales of this lane's tokens in a tile: of score tile n, of its two columns.
template <class C>
struct ValueScales {
  // Of tokens that are masked it may be anything.
  __device__ __forceinline__ float Log2(int n, int which) const {
    float log2;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(UnpackScale(pairs[n], which)));
    return log2 < kLeastLog2 ? kLeastLog2 : log2;  // NaN stays NaN
  }
  // 2^-Log2, but finite for every scale.
  __device__ __forceinline__ float Inverse(int n, int which) const {
    return Exp2(-fmaxf(Log2(n, which), kLeastLog2));
  }

  // A row of zeros has scale 0 and counts in the sum all the same. Elements of a row with a smaller
  // scale than this are read as if it had this one: as at most 2^-57.
  static constexpr float kLeastLog2 = -64;

  uint32_t pairs[C::kScoreTiles];
};

// Turns the scores of a tile into exponents of w. `scales`: the shared address of the tile's
// scales.
template <class C>
__device__ __forceinline__ void ScaleScores(const Work& work, uint32_t scales, int lane,
                                            float (&scores)[C::kRowTiles][C::kScoreTiles][4],
                                            ValueScales<C>* values) {
  const float log2 = SoftmaxScale(work.span.softmax_scale).log2;
  scales += lane % 4 * 4;
#pragma unroll
  for (int n = 0; n < C::kScoreTiles; ++n) {
    const uint32_t keys = Load4(scales + n * 16);
    values->pairs[n] = Load4(scales + C::kScaleBytes / 2 + n * 16);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float factor = UnpackScale(keys, c) * log2;
      const float value = values->Log2(n, c);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        scores[m][n][c] = fmaf(scores[m][n][c], factor, value);
        scores[m][n][2 + c] = fmaf(scores[m][n][2 + c], factor, value);
      }
    }
  }
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_SCORE_SCALE_CUH_
