// The sum of a split's streams that one warp group attends.
#ifndef FLASHCORE_KERNELS_SM80_STREAM_SUMS_CUH_
#define FLASHCORE_KERNELS_SM80_STREAM_SUMS_CUH_

#include <cmath>
#include <type_traits>

#include "kernels/cuda/row_output.cuh"
#include "kernels/sm80/accumulators.cuh"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/softmax.cuh"

namespace flashcore::kernels::sm80 {

// A warp's finished states of the streams that it has attended, added up. The streams of a split
// give the same bits as if each had a warp, and ReduceGroups added them.
template <class C>
struct StreamSums : RowSums<C, float> {
  // Adds the finished state of the next stream.
  __device__ __forceinline__ void Add(const SoftmaxScale& scale, const State<C>& stream) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& max = this->max[m][i];
        float& sum = this->sum[m][i];
        const SumWeights weights(scale.Exponent(max), scale.Exponent(stream.max[m][i]));
        max = fmaxf(max, stream.max[m][i]);
        sum = weights.Add(sum, stream.sum[m][i]);
#pragma unroll
        for (int n = 0; n < C::kOutputTiles; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int c = AccumulatorAt<C>(i, j);
            float& to = this->output[m][n].sums[c];
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
