// Combines the partial results of KV splits. Of few rows, the last block to finish among the splits
// of a work tile does it; of many, a kernel of its own (combine.h).
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

// Part of a packed row's attention over some K/V rows: 4 components of the output, not normalised
// and relative to 2^max, and the row's max and sum. By default over no K/V rows.
struct PartialResult {
  // Adds the attention over the K/V rows that follow.
  __device__ __forceinline__ void Add(const PartialResult& next) {
    const float both = fmaxf(max, next.max);
    const float base = FiniteOr0(both);
    const float factor = Exp2(max - base);
    const float weight = Exp2(next.max - base);
    output.x = fmaf(weight, next.output.x, output.x * factor);
    output.y = fmaf(weight, next.output.y, output.y * factor);
    output.z = fmaf(weight, next.output.z, output.z * factor);
    output.w = fmaf(weight, next.output.w, output.w * factor);
    sum = fmaf(weight, next.sum, sum * factor);
    max = both;
  }

  float4 output = make_float4(0, 0, 0, 0);
  float max = -INFINITY;
  float sum = 0;
};

// Splits are added in groups of this many, in order, and then the groups, in order.
inline constexpr int kSplitGroup = 8;

// Writes the part `thread` of `threads` of O and LSE of the packed rows [begin, end) of a work
// tile, from the partial results of all its splits.
template <class Element>
__device__ __forceinline__ void CombineSplits(const Work& work, int kv_head, RowDivider group,
                                              const Partials& partials, int begin, int end,
                                              int thread, int threads) {
  const int pieces = partials.head_dim / 4;
  const int32_t stride = work.tile.row_count;  // partial rows from a split to the next
#pragma unroll 1
  for (int n = begin * pieces + thread; n < end * pieces; n += threads) {
    const int row = n / pieces;
    const int component = n % pieces * 4;
    const int32_t first = work.tile.PartialRow(kv_head, 0) + row;
    PartialResult all;
#pragma unroll 1
    for (int split = 0; split < work.tile.num_splits; split += kSplitGroup) {
      PartialResult parts[kSplitGroup];
#pragma unroll
      for (int s = 0; s < kSplitGroup; ++s) {
        // Beyond the last split, load it again and discard the values: a branch around the loads
        // would serialise them.
        const int32_t partial = first + min(split + s, work.tile.num_splits - 1) * stride;
        parts[s].output = __ldcg(reinterpret_cast<const float4*>(
            partials.output + int64_t{partial} * partials.head_dim + component));
        parts[s].sum = __ldcg(partials.sum + partial);
        parts[s].max = __ldcg(partials.max + partial);
        if (split + s >= work.tile.num_splits) parts[s] = PartialResult();
      }
      PartialResult of_group;
#pragma unroll
      for (int s = 0; s < kSplitGroup; ++s) of_group.Add(parts[s]);
      all.Add(of_group);
    }
    const OutputRow to(group, kv_head, work.tile.row_begin + row);
    if (component == 0 && work.span.lse != nullptr) *to.Lse(work) = LogSumExp(all.max, all.sum);
    const float inverse = InverseOfSum(all.sum);
    *reinterpret_cast<uint2*>(to.Output(work) + component * 2) =
        make_uint2(ElementTraits<Element>::Pack(all.output.x * inverse, all.output.y * inverse),
                   ElementTraits<Element>::Pack(all.output.z * inverse, all.output.w * inverse));
  }
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SMXX_COMBINE_CUH_
