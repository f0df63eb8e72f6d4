// The sum of a split's phases that one warp group attends.
#ifndef FLASHCORE_KERNELS_SM80_PHASE_SUMS_CUH_
#define FLASHCORE_KERNELS_SM80_PHASE_SUMS_CUH_

#include <cmath>
#include <type_traits>

#include "kernels/cuda/row_output.cuh"
#include "kernels/sm80/accumulators.cuh"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/softmax.cuh"
#include "kernels/sm80/thread.cuh"

namespace flashcore::kernels::sm80 {

// A warp's finished states of the phases that it has attended, added up. The phases of a split
// give the same bits as if each had a warp, and ReduceGroups added them.
template <class C>
struct PhaseSums : RowSums<C, float> {
  // Adds the finished state of the next phase.
  __device__ __forceinline__ void Add(const SoftmaxScale& scale, const State<C>& phase) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& max = this->max[m][i];
        float& sum = this->sum[m][i];
        const SumWeights weights(scale.Exponent(max), scale.Exponent(phase.max[m][i]));
        max = fmaxf(max, phase.max[m][i]);
        sum = weights.Add(sum, phase.sum[m][i]);
#pragma unroll
        for (int n = 0; n < C::kOutputTiles; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int c = AccumulatorAt<C>(i, j);
            float& to = this->output[m][n].sums[c];
            to = weights.Add(to, phase.output[m][n].Get(c));
          }
        }
      }
    }
  }
};

// The state that a warp's main loop leaves for the epilogue.
template <class C>
using Outcome = std::conditional_t<C::kAddsPhases, PhaseSums<C>, State<C>>;

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_PHASE_SUMS_CUH_
