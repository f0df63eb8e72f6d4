// The sum of a split's streams that one warp group attends.
#ifndef FLASHCORE_KERNELS_SM80_STREAM_SUMS_CUH_
#define FLASHCORE_KERNELS_SM80_STREAM_SUMS_CUH_

#include <cmath>
#include <type_traits>

#include "kernels/sm80/accumulators.cuh"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/softmax.cuh"
#include "kernels/smxx/row_output.cuh"

namespace flashcore::kernels::sm80 {

// A warp's finished states of the streams that it has attended, added up. The streams of a split
// give the same bits as if each had a warp, and ReduceGroups added them.
template <class C>
struct StreamSums {
  Accumulators<float> output[C::kRowTiles][C::kOutputTiles];  // relative to 2^Base(max)
  float max[C::kRowTiles][2];                                 // as in State
  float sum[C::kRowTiles][2];                                 // of all lanes

  __device__ __forceinline__ StreamSums() {
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

  // Adds the finished state of the next stream.
  __device__ __forceinline__ void Add(const SoftmaxScale& scale, const State<C>& stream) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const SumWeights weights(scale.Exponent(max[m][i]), scale.Exponent(stream.max[m][i]));
        max[m][i] = fmaxf(max[m][i], stream.max[m][i]);
        sum[m][i] = weights.Add(sum[m][i], stream.sum[m][i]);
#pragma unroll
        for (int n = 0; n < C::kOutputTiles; ++n) {
#pragma unroll
          for (int c = 2 * i; c < 2 * i + 2; ++c) {
            float& to = output[m][n].sums[c];
            to = weights.Add(to, stream.output[m][n].Get(c));
          }
        }
      }
    }
  }
};

// What a warp's main loop leaves for the epilogue.
template <class C>
using Outcome = std::conditional_t<C::kAddsStreams, StreamSums<C>, State<C>>;

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_STREAM_SUMS_CUH_
