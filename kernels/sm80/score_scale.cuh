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
#include "kernels/sm80/thread.cuh"

namespace flashcore::kernels::sm80 {

constexpr float kLog2E = 1.44269504088896340736f;  // log2(e)

// The softmax scale as a positive factor. A negative scale becomes a positive one of -Q. Scale 0
// becomes a factor so small that every finite score rounds to exponent 0, but -infinity (masked)
// stays -infinity.
struct SoftmaxScale {
  __device__ __forceinline__ explicit SoftmaxScale(float softmax_scale)
      : log2(fmaxf(fabsf(softmax_scale) * kLog2E, 1e-37f)) {}

  // The scale of scores that are exponents of 2.
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

// Values derived from the scales of a tile's rows, in shared memory: a table of each warp group.
// Its threads write it together, and read it after their next barrier.
template <class C>
class RowFactors {
 public:
  __device__ __forceinline__ explicit RowFactors(const ThreadPosition<C>& thread)
      : pairs_(SharedAddress(SharedMemory()) + C::kTableOffset +
               thread.warp_group * C::kTableBytes),
        lane_(thread.lane) {}

  // `scales`: the shared address of the tile's scales.
  __device__ __forceinline__ void Write(const Work& work, uint32_t scales) const {
    // Q's rows have it with kQueryParts.
    const float log2 = C::kQueryParts > 0 ? 1 : SoftmaxScale(work.span.terms.softmax_scale).log2;
#pragma unroll
    for (int n = 0; n < C::kTileTokens; n += C::kGroupThreads) {
      const int token = n + ThreadIndex<C>() % C::kGroupThreads;
      if (C::kTileTokens % C::kGroupThreads != 0 && token >= C::kTileTokens) break;
      const float value = ScaleAt(scales + C::kScaleBytes / 2 + token * 2);
      // A row of zeros has scale 0 and counts in the sum all the same. Elements of a row with a
      // smaller scale than this are read as if it had this one: as at most 2^-57.
      constexpr float kLeast = 0x1p-64f;
      // A lane's two tokens of a score tile are side by side.
      const int place = C::kTransposed ? token / 16 * 16 + token % 8 * 2 + token / 8 % 2 : token;
      Store8(pairs_ + place * 8, ScaleAt(scales + token * 2) * log2,
             value < kLeast ? -64 : Log2(value));  // NaN stays NaN
      Store4(inverses() + place * 4, Inverse(fmaxf(value, kLeast)));
    }
  }

  // For each of the lane's two tokens in score tile n: the factor of the score and the logarithm of
  // V's scale.
  __device__ __forceinline__ float4 OfScores(int n) const { return Load16(pairs_ + Place(n) * 8); }
  // The inverses of V's scales, finite for every scale.
  __device__ __forceinline__ float2 OfSums(int n) const { return Load8(inverses() + Place(n) * 4); }

 private:
  // The place of the lane's first token.
  __device__ __forceinline__ int Place(int n) const {
    return C::kTransposed ? 16 * n + lane_ / 4 * 2 : 8 * n + lane_ % 4 * 2;
  }
  __device__ __forceinline__ uint32_t inverses() const { return pairs_ + C::kTileTokens * 8; }

  static __device__ __forceinline__ float ScaleAt(uint32_t address) {
    return __uint_as_float(static_cast<uint32_t>(Load2(address)) << 16);
  }
  static __device__ __forceinline__ float Log2(float value) {
    float log2;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(value));
    return log2;
  }
  static __device__ __forceinline__ float Inverse(float value) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(value));
    return inverse;
  }

  const uint32_t pairs_;
  const int lane_;
};

// Turns the scores of a tile into exponents of w.
template <class C>
__device__ __forceinline__ void ScaleScores(const RowFactors<C>& factors,
                                            float (&scores)[C::kRowTiles][C::kScoreTiles][4]) {
#pragma unroll
  for (int n = 0; n < C::kScoreTiles; ++n) {
    const float4 pair = factors.OfScores(n);
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& first = scores[m][n][AccumulatorAt<C>(i, 0)];
        float& second = scores[m][n][AccumulatorAt<C>(i, 1)];
        first = fmaf(first, pair.x, pair.y);
        second = fmaf(second, pair.z, pair.w);
      }
    }
  }
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_SCORE_SCALE_CUH_
