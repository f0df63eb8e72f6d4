// The epilogue: from a thread's accumulators to O and LSE, or to partial results.
#ifndef FLASHCORE_KERNELS_SM80_EPILOGUE_CUH_
#define FLASHCORE_KERNELS_SM80_EPILOGUE_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/partials.h"
#include "kernels/plan.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/softmax.cuh"
#include "kernels/smxx/row_output.cuh"

namespace flashcore::kernels::sm80 {

// The block's results in shared memory. Row r of token warp w is staged row w * kRows + r.
template <class C>
struct StagedRows {
  __device__ __forceinline__ explicit StagedRows(std::byte* shared)
      : output(reinterpret_cast<float*>(shared)),
        max(output + C::kStagedRows * C::kStagedRow),
        sum(max + C::kStagedRows) {}

  float* output;  // [kStagedRows][kStagedRow]
  float* max;     // [kStagedRows]
  float* sum;     // [kStagedRows]
};

template <class C>
__device__ __forceinline__ void StageRows(const State<C>& state, const Position<C>& position,
                                          const StagedRows<C>& staged) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = position.token_warp * C::kRows + position.Row(i);
    float* to = staged.output + row * C::kStagedRow + position.lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < C::kOutputTiles; ++n) {
      *reinterpret_cast<float2*>(to + 8 * n) =
          make_float2(state.output[n][2 * i], state.output[n][2 * i + 1]);
    }
    const float sum = SumOfRow(state.sum[i]);
    if (position.lane % 4 == 0) {
      staged.max[row] = state.max[i];
      staged.sum[row] = sum;
    }
  }
}

// One chunk of a row of the tile, all token warps merged.
template <class C>
__device__ __forceinline__ RowChunk MergeWarps(const StagedRows<C>& staged, int row, int chunk) {
  RowChunk merged;
#pragma unroll
  for (int w = 0; w < C::kTokenWarps; ++w) {
    merged.max = fmaxf(merged.max, staged.max[w * C::kRows + row]);
  }
#pragma unroll
  for (int w = 0; w < C::kTokenWarps; ++w) {
    const int from = w * C::kRows + row;
    merged.Add(staged.output + from * C::kStagedRow + chunk * kChunk, staged.max[from],
               staged.sum[from]);
  }
  return merged;
}

// Writes a chunk of a partial row, to be combined with those of the other splits.
__device__ __forceinline__ void WritePartial(const Partials& partials, int32_t row, int chunk,
                                             const RowChunk& from) {
  auto* to = reinterpret_cast<float4*>(partials.output + int64_t{row} * partials.head_dim +
                                       chunk * kChunk);
  to[0] = make_float4(from.output[0], from.output[1], from.output[2], from.output[3]);
  to[1] = make_float4(from.output[4], from.output[5], from.output[6], from.output[7]);
  if (chunk == 0) {
    partials.max[row] = from.max;
    partials.sum[row] = from.sum;
  }
}

// Writes the results of an item. Takes shared memory over from the main loop.
template <class C>
__device__ __forceinline__ void WriteResults(const State<C>& state, const Span& span,
                                             const WorkItem& item, int32_t group,
                                             const Partials& partials, const Position<C>& position,
                                             std::byte* shared) {
  const StagedRows<C> staged(shared);
  StageRows<C>(state, position, staged);
  __syncthreads();
  constexpr int kChunks = C::kHeadDim / kChunk;
  for (int i = threadIdx.x; i < item.row_count * kChunks; i += C::kThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const RowChunk merged = MergeWarps<C>(staged, row, chunk);
    if (item.partial_row < 0) {
      WriteChunk<typename C::Element>(span, group, item.kv_head, item.row_begin + row, chunk,
                                      merged);
    } else {
      WritePartial(partials, item.partial_row + row, chunk, merged);
    }
  }
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_EPILOGUE_CUH_
