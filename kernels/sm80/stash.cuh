// Where a warp group that attends two phases one after the other keeps the first one's result.
#ifndef FLASHCORE_KERNELS_SM80_STASH_CUH_
#define FLASHCORE_KERNELS_SM80_STASH_CUH_

#include <cmath>

#include "kernels/cuda/row_output.cuh"
#include "kernels/sm80/accumulators.cuh"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/ptx.cuh"
#include "kernels/sm80/softmax.cuh"

namespace flashcore::kernels::sm80 {

// In shared memory. Each thread stores and adds its own accumulators.
template <class C>
class Stash {
 public:
  __device__ __forceinline__ Stash()
      : first_(reinterpret_cast<float4*>(SharedMemory() + C::kStashOffset) + threadIdx.x) {}

  // Stores the finished state of the first phase.
  __device__ __forceinline__ void Store(const SoftmaxScale& scale, const State<C>& state) const {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      Stats(m) = make_float4(scale.Exponent(state.max[m][0]), scale.Exponent(state.max[m][1]),
                             state.sum[m][0], state.sum[m][1]);
#pragma unroll
      for (int n = 0; n < C::kOutputTiles; ++n) Tile(m, n) = AsFloat4(state.output[m][n]);
    }
  }

  // Adds the first phase to the second one's output, relative to 2^max, and sum, with the bits of
  // a cross-warp reduce of two groups: half of the columns add the second phase first. If not
  // `stashed`, there was one phase.
  __device__ __forceinline__ void AddTo(bool stashed,
                                        float (&output)[C::kRowTiles][C::kOutputTiles][4],
                                        float (&max)[C::kRowTiles][2],
                                        float (&sum)[C::kRowTiles][2]) const {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      const float4 stats = stashed ? Stats(m) : make_float4(-INFINITY, -INFINITY, 0, 0);
      const SumWeights weights[2] = {SumWeights(stats.x, max[m][0]),
                                     SumWeights(stats.y, max[m][1])};
      max[m][0] = weights[0].max;
      max[m][1] = weights[1].max;
      sum[m][0] = weights[0].Add(stats.z, sum[m][0]);
      sum[m][1] = weights[1].Add(stats.w, sum[m][1]);
#pragma unroll
      for (int n = 0; n < C::kOutputTiles; ++n) {
        const float4 first = stashed ? Tile(m, n) : make_float4(0, 0, 0, 0);
        const float of_first[4] = {first.x, first.y, first.z, first.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const SumWeights& row = weights[c / 2];
          float& both = output[m][n][c];
          // Adding to 0 first makes 0 of -0.
          both = n < C::kOutputTiles / 2
                     ? fmaf(row.second, both, fmaf(row.first, of_first[c], 0.0f))
                     : fmaf(row.first, of_first[c], fmaf(row.second, both, 0.0f));
        }
      }
    }
  }

 private:
  static constexpr int kTiles = C::kRowTiles * C::kOutputTiles;
  static_assert(C::kStashBytes == (kTiles + C::kRowTiles) * C::kThreads * 16);

  __device__ __forceinline__ float4& Tile(int m, int n) const {
    return first_[(m * C::kOutputTiles + n) * C::kThreads];
  }
  // The two maxima (exponents of 2) and the two sums of row tile m.
  __device__ __forceinline__ float4& Stats(int m) const {
    return first_[(kTiles + m) * C::kThreads];
  }

  float4* const first_;
};

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_STASH_CUH_
