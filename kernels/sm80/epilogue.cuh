// The end of a block, and of a split in a run of large tiles: reduces the outcomes of the block's
// warp groups, adds the earlier splits of the run, and writes O and LSE, or partial results.
#ifndef FLASHCORE_KERNELS_SM80_EPILOGUE_CUH_
#define FLASHCORE_KERNELS_SM80_EPILOGUE_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/row_output.cuh"
#include "kernels/cuda/work_list.h"
#include "kernels/sm80/accumulators.cuh"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/phase_sums.cuh"
#include "kernels/sm80/ptx.cuh"
#include "kernels/sm80/softmax.cuh"
#include "kernels/sm80/stash.cuh"
#include "kernels/sm80/thread.cuh"

namespace flashcore::kernels::sm80 {

// A warp's output after the cross-warp reduce: the output tiles [first_tile, first_tile +
// kSliceTiles) of its rows.
template <class C>
struct OutputSlice {
  float output[C::kRowTiles][C::kSliceTiles][4];  // layout of State, relative to 2^max
  float max[C::kRowTiles][2];                     // exponents of 2
  float sum[C::kRowTiles][2];                     // of all lanes
  int first_tile;
};

// Shared memory of the cross-warp reduce: 16 bytes per lane and entry.
template <class C>
class ReduceBuffer {
 public:
  __device__ __forceinline__ ReduceBuffer(std::byte* shared, const ThreadPosition<C>& thread)
      : stats_(reinterpret_cast<float4*>(shared) + thread.row_warp * 32 + thread.lane) {}

  // The two maxima (exponents of 2) and the two sums of row tile m.
  __device__ __forceinline__ float4& Stats(int warp_group, int m) const {
    return stats_[(warp_group * C::kRowTiles + m) * C::kGroupThreads];
  }
  // The nth output tile that the group stores.
  __device__ __forceinline__ float4& Tile(int warp_group, int m, int n) const {
    const int row_tile = warp_group * C::kReduceRowTiles + m % C::kReduceRowTiles;
    return stats_[C::kStatBytes / 16 + (row_tile * C::kReduceTiles + n) * C::kGroupThreads];
  }

 private:
  float4* const stats_;
};

// Output tile `of_group0` for group 0 and `of_group1` for group 1. Selects between registers, which
// cannot be indexed at run time.
template <class C>
__device__ __forceinline__ float4 SelectTile(const Outcome<C>& outcome, int warp_group, int m,
                                             int of_group0, int of_group1) {
  const float4 first = AsFloat4(outcome.output[m][of_group0]);
  const float4 second = AsFloat4(outcome.output[m][of_group1]);
  return make_float4(warp_group == 0 ? first.x : second.x, warp_group == 0 ? first.y : second.y,
                     warp_group == 0 ? first.z : second.z, warp_group == 0 ? first.w : second.w);
}

// tile += part * weights; weights.x is for the lane's first row, weights.y for the second.
__device__ __forceinline__ void AddWeighted(const float4& part, const float2& weights,
                                            float (&tile)[4]) {
  tile[0] = fmaf(part.x, weights.x, tile[0]);
  tile[1] = fmaf(part.y, weights.x, tile[1]);
  tile[2] = fmaf(part.z, weights.y, tile[2]);
  tile[3] = fmaf(part.w, weights.y, tile[3]);
}

// Stores the output tiles of row tile m that other groups reduce: with two groups the other's
// slice, with more all tiles, because registers cannot be indexed by the group.
template <class C>
__device__ __forceinline__ void StoreForReduce(const Outcome<C>& outcome, int warp_group, int m,
                                               const ReduceBuffer<C>& buffer) {
#pragma unroll
  for (int n = 0; n < C::kReduceTiles; ++n) {
    if constexpr (C::kWarpGroups == 2) {
      buffer.Tile(warp_group, m, n) = SelectTile<C>(outcome, warp_group, m, C::kSliceTiles + n, n);
    } else {
      buffer.Tile(warp_group, m, n) = AsFloat4(outcome.output[m][n]);
    }
  }
}

// Adds up the outcomes of several warp groups, in their order, to one slice per warp. The slice has
// the warp's own max and sum.
template <class C>
__device__ __forceinline__ void ReduceGroups(const Outcome<C>& outcome, int warp_group,
                                             const ReduceBuffer<C>& buffer, OutputSlice<C>* slice) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
    if (m < C::kReduceRowTiles) StoreForReduce<C>(outcome, warp_group, m, buffer);
    buffer.Stats(warp_group, m) =
        make_float4(slice->max[m][0], slice->max[m][1], slice->sum[m][0], slice->sum[m][1]);
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
    if (m >= C::kReduceRowTiles) {
      __syncthreads();
      StoreForReduce<C>(outcome, warp_group, m, buffer);
      __syncthreads();
    }
    float(&max)[2] = slice->max[m];
    float(&sum)[2] = slice->sum[m];
    max[0] = max[1] = -INFINITY;
    sum[0] = sum[1] = 0;
    SumWeights weights[C::kWarpGroups][2];  // of the groups before, and of the group
#pragma unroll
    for (int g = 0; g < C::kWarpGroups; ++g) {
      const float4 stats = buffer.Stats(g, m);
      weights[g][0] = SumWeights(max[0], stats.x);
      weights[g][1] = SumWeights(max[1], stats.y);
      sum[0] = weights[g][0].Add(sum[0], stats.z);
      sum[1] = weights[g][1].Add(sum[1], stats.w);
      max[0] = weights[g][0].max;
      max[1] = weights[g][1].max;
    }
#pragma unroll
    for (int n = 0; n < C::kSliceTiles; ++n) {
      float(&tile)[4] = slice->output[m][n];
#pragma unroll
      for (int c = 0; c < 4; ++c) tile[c] = 0;
      if constexpr (C::kWarpGroups == 2) {
        // The warp's own tile first.
        const SumWeights(&both)[2] = weights[1];
        const float2 of_group0 = make_float2(both[0].first, both[1].first);
        const float2 of_group1 = make_float2(both[0].second, both[1].second);
        AddWeighted(SelectTile<C>(outcome, warp_group, m, n, C::kSliceTiles + n),
                    warp_group == 0 ? of_group0 : of_group1, tile);
        AddWeighted(buffer.Tile(1 - warp_group, m, n), warp_group == 0 ? of_group1 : of_group0,
                    tile);
      } else {
#pragma unroll
        for (int g = 0; g < C::kWarpGroups; ++g) {
          const float4 part = buffer.Tile(g, m, slice->first_tile + n);
          const float of_part[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            tile[c] = weights[g][RowOfAccumulator<C>(c)].Add(tile[c], of_part[c]);
          }
        }
      }
    }
  }
}

// Reduces the outcomes of all warp groups to one slice per warp.
template <class C>
__device__ __forceinline__ void CrossWarpReduce(const SoftmaxScale& scale,
                                                const ThreadPosition<C>& thread,
                                                const Outcome<C>& outcome, std::byte* shared,
                                                OutputSlice<C>* slice) {
  slice->first_tile = thread.warp_group * C::kSliceTiles;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      slice->max[m][i] = scale.Exponent(outcome.max[m][i]);
      slice->sum[m][i] = outcome.sum[m][i];
    }
  }
  if constexpr (C::kWarpGroups > 1) {
    ReduceGroups<C>(outcome, thread.warp_group, ReduceBuffer<C>(shared, thread), slice);
  } else {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < C::kSliceTiles; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) slice->output[m][n][c] = outcome.output[m][n].Get(c);
      }
    }
  }
}

// Writes a slice as partial results, to be combined.
// partial_row(r): the partial row of the work item's packed row r.
template <class C, class PartialRow>
__device__ __forceinline__ void WritePartials(const OutputSlice<C>& slice, const Work& work,
                                              const PartialRow& partial_row,
                                              const Partials& partials,
                                              const ThreadPosition<C>& thread) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (thread.Row(m, i) >= work.tile.row_count) continue;
      const int32_t row = partial_row(thread.Row(m, i));
      float* const to =
          partials.output + int64_t{row} * C::kHeadDim + C::kMmaColumns * slice.first_tile;
#pragma unroll
      for (int n = 0; n < C::kSliceTiles; ++n) {
        *reinterpret_cast<float2*>(to + thread.Column(n)) = make_float2(
            slice.output[m][n][AccumulatorAt<C>(i, 0)], slice.output[m][n][AccumulatorAt<C>(i, 1)]);
      }
      if (slice.first_tile == 0 && thread.IsFirstOfRows()) {
        partials.max[row] = slice.max[m][i];
        partials.sum[row] = slice.sum[m][i];
      }
    }
  }
}

// WritePartials of an item that is no cascade item.
template <class C>
__device__ __forceinline__ void WriteTilePartials(const OutputSlice<C>& slice, const Work& work,
                                                  int kv_head, const Partials& partials,
                                                  const ThreadPosition<C>& thread) {
  const int32_t first = work.tile.PartialRow(kv_head, work.tile.part);
  WritePartials<C>(
      slice, work, [=](int row) { return first + row; }, partials, thread);
}

// Writes a slice to O, and LSE. O goes through the warp's own shared memory at `staging`, so that
// global writes are 16 bytes each.
template <class C>
__device__ __forceinline__ void WriteRows(const OutputSlice<C>& slice, const Work& work,
                                          int kv_head, RowDivider group,
                                          const ThreadPosition<C>& thread, std::byte* staging) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float factor = InverseOfSum(slice.sum[m][i]);
      const int row = m * C::kMmaRows + thread.FirstRow() + C::kRowStep * i;
      auto* const to = reinterpret_cast<uint32_t*>(staging + row * C::kStagingPitch);
#pragma unroll
      for (int n = 0; n < C::kSliceTiles; ++n) {
        const float(&tile)[4] = slice.output[m][n];
        to[thread.Column(n) / 2] = ElementTraits<typename C::Element>::Pack(
            tile[AccumulatorAt<C>(i, 0)] * factor, tile[AccumulatorAt<C>(i, 1)] * factor);
      }
    }
  }
  __syncwarp();
  const int first_row = thread.row_warp * C::kWarpRows;
  constexpr int kPieces = C::kSliceColumns / 8;  // of 16 bytes, of a row
  const int first_piece = slice.first_tile * C::kMmaColumns / 8;
#pragma unroll
  for (int begin = 0; begin < C::kWarpRows * kPieces; begin += 32) {
    const int row = (begin + thread.lane) / kPieces;
    const int piece = (begin + thread.lane) % kPieces;
    if (row >= C::kWarpRows || first_row + row >= work.tile.row_count) break;
    const OutputRow to(group, kv_head, work.tile.row_begin + first_row + row);
    reinterpret_cast<uint4*>(to.Output(work))[first_piece + piece] =
        reinterpret_cast<const uint4*>(staging + row * C::kStagingPitch)[piece];
  }
  if (work.span.lse == nullptr || slice.first_tile > 0 || !thread.IsFirstOfRows()) return;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = thread.Row(m, i);
      if (row >= work.tile.row_count) continue;
      *OutputRow(group, kv_head, work.tile.row_begin + row).Lse(work) =
          LogSumExp(slice.max[m][i], slice.sum[m][i]);
    }
  }
}

// Two output tiles of a partial row between two splits of its run, as the lane's accumulators: only
// this lane reads them then.
template <class C>
__device__ __forceinline__ float4* RunTiles(const Partials& partials, int32_t row, int n) {
  const ThreadPosition<C> thread;
  float* const tiles = partials.output + int64_t{row} * C::kHeadDim + 8 * n;
  return reinterpret_cast<float4*>(tiles) + thread.lane % 4;
}

// Adds the partial results of the run so far to the slice of its next split, as the combine does
// (combine.cuh).
template <class C>
__device__ __forceinline__ void AddRun(const Work& work, const Partials& partials,
                                       OutputSlice<C>* slice) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Computed for each row, it needs no registers between two.
      const ThreadPosition<C> thread;
      const int32_t row = work.tile.PartialRow(KvHead(), work.tile.part) +
                          min(thread.Row(m, i), work.tile.row_count - 1);
      const SumWeights weights(__ldcg(partials.max + row), slice->max[m][i]);
      slice->max[m][i] = weights.max;
      slice->sum[m][i] = weights.Add(__ldcg(partials.sum + row), slice->sum[m][i]);
#pragma unroll
      for (int n = 0; n < C::kSliceTiles; n += 2) {
        const float4 run = __ldcg(RunTiles<C>(partials, row, n));
        float(&first)[4] = slice->output[m][n];
        first[2 * i] = weights.Add(run.x, first[2 * i]);
        first[2 * i + 1] = weights.Add(run.y, first[2 * i + 1]);
        float(&second)[4] = slice->output[m][n + 1];
        second[2 * i] = weights.Add(run.z, second[2 * i]);
        second[2 * i + 1] = weights.Add(run.w, second[2 * i + 1]);
      }
    }
  }
  __syncwarp();  // what the lanes of a row read, one of them overwrites, or the others
}

// Writes the partial results of a run up to the split that ends here, for AddRun.
template <class C>
__device__ __forceinline__ void WriteRun(const SoftmaxScale& scale, const Work& work, bool is_first,
                                         const Partials& partials, const State<C>& state) {
  const ThreadPosition<C> thread;
  OutputSlice<C> slice;
  CrossWarpReduce<C>(scale, thread, state, nullptr, &slice);
  if (!is_first) AddRun<C>(work, partials, &slice);
  const int32_t first_row = work.tile.PartialRow(KvHead(), work.tile.part);
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (thread.Row(m, i) >= work.tile.row_count) continue;
      const int32_t row = first_row + thread.Row(m, i);
#pragma unroll
      for (int n = 0; n < C::kSliceTiles; n += 2) {
        const float(&first)[4] = slice.output[m][n];
        const float(&second)[4] = slice.output[m][n + 1];
        *RunTiles<C>(partials, row, n) =
            make_float4(first[2 * i], first[2 * i + 1], second[2 * i], second[2 * i + 1]);
      }
      if (thread.lane % 4 > 0) continue;
      partials.max[row] = slice.max[m][i];
      partials.sum[row] = slice.sum[m][i];
    }
  }
}

// Writes the partial results of a cascade item's members.
template <class C>
__device__ __forceinline__ void WriteCascade(const SoftmaxScale& scale, const Work& work,
                                             int kv_head, const Partials& partials,
                                             const State<C>& state) {
  const ThreadPosition<C> thread;
  OutputSlice<C> slice;
  CrossWarpReduce<C>(scale, thread, state, SharedMemory(), &slice);
  const int member_rows = work.tile.row_count / work.tile.num_members;
  const auto partial_row = [&](int row) {
    const int n = row / member_rows;
    const WorkTile& member = work.Member(n).tile;
    return member.PartialRow(kv_head, work.tile.part) + row - n * member_rows;
  };
  WritePartials<C>(slice, work, partial_row, partials, thread);
}

// Writes the results of a block. Reuses the shared memory of the main loop.
template <class C>
__device__ __forceinline__ void WriteResults(const SoftmaxScale& scale, const Work& work,
                                             int kv_head, RowDivider group,
                                             const Partials& partials, const Outcome<C>& outcome) {
  const ThreadPosition<C> thread;
  OutputSlice<C> slice;
  CrossWarpReduce<C>(scale, thread, outcome, SharedMemory(), &slice);
  if constexpr (C::kStashes) {
    const bool stashed = work.tile.kv_end - work.tile.kv_begin > C::kTileTokens;
    Stash<C>().AddTo(stashed, slice.output, slice.max, slice.sum);
  }
  if constexpr (C::kAddsSplits) {
    if (work.tile.IsRun()) AddRun<C>(work, partials, &slice);
  }
  if (work.tile.num_parts > 1) {
    WriteTilePartials<C>(slice, work, kv_head, partials, thread);
  } else {
    const int warp = thread.warp_group * C::kRowWarps + thread.row_warp;
    WriteRows<C>(slice, work, kv_head, group, thread,
                 SharedMemory() + C::kStagingOffset + warp * C::kWarpRows * C::kStagingPitch);
  }
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_EPILOGUE_CUH_
