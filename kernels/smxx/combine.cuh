// Combines the partial results of KV splits. It is not a kernel of its own: the last block to
// finish among the splits of a work tile runs it.
#ifndef FLASHCORE_KERNELS_SMXX_COMBINE_CUH_
#define FLASHCORE_KERNELS_SMXX_COMBINE_CUH_

#include <cmath>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/smxx/element.cuh"
#include "kernels/smxx/row_output.cuh"
#include "kernels/smxx/work_list.h"

namespace flashcore::kernels {

// Whether this block is the last of `num_splits` to finish; then it can read the partial results of
// all. Called by every thread of a block after it has written its own. `*finished` counts the
// blocks: 0 before the first and again after the last.
__device__ __forceinline__ bool IsLastSplit(int32_t num_splits, int32_t* finished) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    // Releases the writes of this block, which the barrier has ordered before; acquires those of
    // the other blocks.
    int32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(finished)
                 : "memory");
    last = before == num_splits - 1;
    if (last) *finished = 0;
  }
  return __syncthreads_or(last);
}

// Writes O and LSE of the block's packed rows from the partial results of all splits. All kThreads
// threads take part; each combines 4 components of a row at a time, in split order.
template <class Element, int kThreads>
__device__ __forceinline__ void CombineSplits(const Work& work, int kv_head, RowDivider group,
                                              const Partials& partials) {
  constexpr int kBatch = 8;  // splits whose loads are in flight together
  const int pieces = partials.head_dim / 4;
  const int32_t stride = work.tile.row_count;  // partial rows from a split to the next
#pragma unroll 1
  for (int n = threadIdx.x; n < work.tile.row_count * pieces; n += kThreads) {
    const int row = n / pieces;
    const int component = n % pieces * 4;
    const int32_t first = work.tile.PartialRow(kv_head, 0) + row;
    float4 output = make_float4(0, 0, 0, 0);  // relative to 2^max
    float max = -INFINITY, sum = 0;
#pragma unroll 1
    for (int begin = 0; begin < work.tile.num_splits; begin += kBatch) {
      float4 parts[kBatch];
      float maxima[kBatch], sums[kBatch];
#pragma unroll
      for (int s = 0; s < kBatch; ++s) {
        // Beyond the last split, load it again and discard the values: a branch around the loads
        // would serialise them.
        const int32_t partial = first + min(begin + s, work.tile.num_splits - 1) * stride;
        parts[s] = __ldcg(reinterpret_cast<const float4*>(
            partials.output + int64_t{partial} * partials.head_dim + component));
        sums[s] = __ldcg(partials.sum + partial);
        maxima[s] = __ldcg(partials.max + partial);
        if (begin + s >= work.tile.num_splits) {
          parts[s] = make_float4(0, 0, 0, 0);
          sums[s] = 0;
          maxima[s] = -INFINITY;
        }
      }
      const float before = max;
#pragma unroll
      for (int s = 0; s < kBatch; ++s) max = fmaxf(max, maxima[s]);
      const float base = FiniteOr0(max);
      const float factor = Exp2(before - base);
      output =
          make_float4(output.x * factor, output.y * factor, output.z * factor, output.w * factor);
      sum *= factor;
#pragma unroll
      for (int s = 0; s < kBatch; ++s) {
        const float weight = Exp2(maxima[s] - base);
        output.x = fmaf(weight, parts[s].x, output.x);
        output.y = fmaf(weight, parts[s].y, output.y);
        output.z = fmaf(weight, parts[s].z, output.z);
        output.w = fmaf(weight, parts[s].w, output.w);
        sum = fmaf(weight, sums[s], sum);
      }
    }
    const OutputRow to(group, kv_head, work.tile.row_begin + row);
    if (component == 0 && work.span.lse != nullptr) *to.Lse(work) = LogSumExp(max, sum);
    const float inverse = InverseOfSum(sum);
    *reinterpret_cast<uint2*>(to.Output(work) + component * 2) =
        make_uint2(ElementTraits<Element>::Pack(output.x * inverse, output.y * inverse),
                   ElementTraits<Element>::Pack(output.z * inverse, output.w * inverse));
  }
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SMXX_COMBINE_CUH_
