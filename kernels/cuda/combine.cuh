// Combines the partial results of splits or runs (plan.h). Few of them, of a tile of few rows, the
// last block to finish among those of the tile combines; others, and those of spans that share
// cascade items, a kernel of its own (combine.h).
#ifndef FLASHCORE_KERNELS_CUDA_COMBINE_CUH_
#define FLASHCORE_KERNELS_CUDA_COMBINE_CUH_

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/attention.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/row_output.cuh"
#include "kernels/cuda/work_list.h"

namespace flashcore::kernels {

// Whether this block is the last of `num_parts` to finish; then it can read the partial results of
// all. Called by every thread of a block after it has written its own. `*finished` counts the
// blocks: 0 before the first and again after the last.
__device__ __forceinline__ bool IsLastPart(int32_t num_parts, int32_t* finished) {
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
    last = before == num_parts - 1;
    if (last) *finished = 0;
  }
  return __syncthreads_or(last);
}

// Part of a packed row's attention over some K/V rows: 4 components of the output, not normalised
// and relative to 2^max, and the row's max and sum. By default over no K/V rows.
struct PartialResult {
  // Adds the attention over the K/V rows that follow.
  __device__ __forceinline__ void Add(const PartialResult& next) {
    const SumWeights weights(max, next.max);
    output.x = weights.Add(output.x, next.output.x);
    output.y = weights.Add(output.y, next.output.y);
    output.z = weights.Add(output.z, next.output.z);
    output.w = weights.Add(output.w, next.output.w);
    sum = weights.Add(sum, next.sum);
    max = weights.max;
  }

  float4 output = make_float4(0, 0, 0, 0);
  float max = -INFINITY;
  float sum = 0;
};

// As CombineParts, for a tile of which a run has kRunParts parts: a divisor of kRunSplits.
template <class Element, int kRunParts>
__device__ __forceinline__ void CombineRuns(const Work& work, int kv_head, RowDivider group,
                                            const Partials& partials, int begin, int end,
                                            int thread, int threads) {
  const int pieces = partials.head_dim / 4;
  const int32_t stride = work.tile.row_count;  // partial rows from a part to the next
#pragma unroll 1
  for (int n = begin * pieces + thread; n < end * pieces; n += threads) {
    const int row = n / pieces;
    const int component = n % pieces * 4;
    const int32_t first = work.tile.PartialRow(kv_head, 0) + row;
    PartialResult all;
#pragma unroll 1
    for (int part = 0; part < work.tile.num_parts; part += kRunSplits) {
      PartialResult parts[kRunSplits];
#pragma unroll
      for (int p = 0; p < kRunSplits; ++p) {
        // Beyond the last part, load it again and discard the values: a branch around the loads
        // would serialise them.
        const int32_t partial = first + min(part + p, work.tile.num_parts - 1) * stride;
        parts[p].output = __ldcg(reinterpret_cast<const float4*>(
            partials.output + int64_t{partial} * partials.head_dim + component));
        parts[p].sum = __ldcg(partials.sum + partial);
        parts[p].max = __ldcg(partials.max + partial);
        if (part + p >= work.tile.num_parts) parts[p] = PartialResult();
      }
#pragma unroll
      for (int begin_run = 0; begin_run < kRunSplits; begin_run += kRunParts) {
        PartialResult run = parts[begin_run];
        if constexpr (kRunParts > 1) {
          run = PartialResult();
#pragma unroll
          for (int p = 0; p < kRunParts; ++p) run.Add(parts[begin_run + p]);
        }
        all.Add(run);
      }
    }
    const OutputRow to(group, kv_head, work.tile.row_begin + row);
    if (component == 0 && work.span.lse != nullptr) *to.Lse(work) = LogSumExp(all.max, all.sum);
    const float inverse = InverseOfSum(all.sum);
    *reinterpret_cast<uint2*>(to.Output(work) + component * 2) =
        make_uint2(ElementTraits<Element>::Pack(all.output.x * inverse, all.output.y * inverse),
                   ElementTraits<Element>::Pack(all.output.z * inverse, all.output.w * inverse));
  }
}

// Writes the part `thread` of `threads` of O and LSE of the packed rows [begin, end) of a work
// tile, from the partial results of all its splits or runs. Splits are added run by run. kRunParts:
// the run_parts that the tile may have.
template <class Element, int... kRunParts>
__device__ __forceinline__ void CombineParts(std::integer_sequence<int, kRunParts...>,
                                             const Work& work, int kv_head, RowDivider group,
                                             const Partials& partials, int begin, int end,
                                             int thread, int threads) {
  const auto combine = [&](auto run_parts) {
    constexpr int kParts = decltype(run_parts)::value;
    if (work.tile.run_parts != kParts) return;
    CombineRuns<Element, kParts>(work, kv_head, group, partials, begin, end, thread, threads);
  };
  (combine(std::integral_constant<int, kRunParts>()), ...);
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CUDA_COMBINE_CUH_
