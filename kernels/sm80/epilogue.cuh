// The epilogue: from the states of a block's teams to O and LSE, or to partial results.
#ifndef FLASHCORE_KERNELS_SM80_EPILOGUE_CUH_
#define FLASHCORE_KERNELS_SM80_EPILOGUE_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/softmax.cuh"
#include "kernels/smxx/element.cuh"
#include "kernels/smxx/row_output.cuh"
#include "kernels/smxx/work_list.h"

namespace flashcore::kernels::sm80 {

// A warp's share of its rows' finished output: tiles [first_tile, first_tile + kShareTiles), all
// teams merged.
template <class C>
struct Share {
  float output[C::kRowTiles][C::kShareTiles][4];  // laid out as in State, relative to 2^max
  float max[C::kRowTiles][2];                     // as powers of 2
  float sum[C::kRowTiles][2];                     // of all lanes
  int first_tile;
};

// What warps pass on to the warps of other teams with the same rows, in shared memory: pieces of
// 16 bytes a lane.
template <class C>
class PassedStates {
 public:
  __device__ __forceinline__ PassedStates(std::byte* shared, const Position<C>& position)
      : stats_(reinterpret_cast<float4*>(shared) + position.row_warp * 32 + position.lane) {}

  // Maxima, as powers of 2, and sums of row tile m.
  __device__ __forceinline__ float4& Stats(int team, int m) const {
    return stats_[(team * C::kRowTiles + m) * C::kTeamThreads];
  }
  // Number n of the tiles that the team passes on.
  __device__ __forceinline__ float4& Tile(int team, int m, int n) const {
    return stats_[C::kStatBytes / 16 +
                  ((team * C::kRowTiles + m) * C::kPassedTiles + n) * C::kTeamThreads];
  }

 private:
  float4* const stats_;
};

template <class Sum>
__device__ __forceinline__ float4 AsFloat4(const Accumulators<Sum>& tile) {
  return make_float4(tile.Get(0), tile.Get(1), tile.Get(2), tile.Get(3));
}

// Tile n of the half of a state's output that starts at tile `begin_if_first` for team 0 and at
// `begin_if_second` for team 1: a choice between registers, because they cannot be indexed.
template <class C>
__device__ __forceinline__ float4 TileOfHalf(const State<C>& state, int team, int m,
                                             int begin_if_first, int begin_if_second) {
  const float4 first = AsFloat4(state.output[m][begin_if_first]);
  const float4 second = AsFloat4(state.output[m][begin_if_second]);
  return make_float4(team == 0 ? first.x : second.x, team == 0 ? first.y : second.y,
                     team == 0 ? first.z : second.z, team == 0 ? first.w : second.w);
}

// tile += part * weights, the weights of its two rows.
__device__ __forceinline__ void AddWeighted(const float4& part, const float2& weights,
                                            float (&tile)[4]) {
  tile[0] = fmaf(part.x, weights.x, tile[0]);
  tile[1] = fmaf(part.y, weights.x, tile[1]);
  tile[2] = fmaf(part.z, weights.y, tile[2]);
  tile[3] = fmaf(part.w, weights.y, tile[3]);
}

// Passes on what other teams merge. Of two teams, that is the half that the other merges; of more,
// everything, because registers cannot be indexed by the team.
template <class C>
__device__ __forceinline__ void PassOn(const State<C>& state, int team,
                                       const PassedStates<C>& passed) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kPassedTiles; ++n) {
      if constexpr (C::kTeams == 2) {
        passed.Tile(team, m, n) = TileOfHalf<C>(state, team, m, C::kShareTiles + n, n);
      } else {
        passed.Tile(team, m, n) = AsFloat4(state.output[m][n]);
      }
    }
  }
}

// Merges the states of all teams, with sums in an order that depends on nothing.
template <class C>
__device__ __forceinline__ void MergeTeams(const SoftmaxScale& scale, const Position<C>& position,
                                           const State<C>& state, std::byte* shared,
                                           Share<C>* share) {
  const int team = position.team;
  const PassedStates<C> passed(shared, position);
  share->first_tile = team * C::kShareTiles;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      share->max[m][i] = scale.Exponent(state.max[m][i]);
      share->sum[m][i] = state.sum[m][i];
    }
  }
  if constexpr (C::kTeams == 1) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < C::kShareTiles; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) share->output[m][n][c] = state.output[m][n].Get(c);
      }
    }
    return;
  }
  PassOn<C>(state, team, passed);
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
    passed.Stats(team, m) =
        make_float4(share->max[m][0], share->max[m][1], share->sum[m][0], share->sum[m][1]);
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
    float4 stats[C::kTeams];
    float2 max = make_float2(-INFINITY, -INFINITY), sum = make_float2(0, 0);
#pragma unroll
    for (int t = 0; t < C::kTeams; ++t) {
      stats[t] = passed.Stats(t, m);
      max = make_float2(fmaxf(max.x, stats[t].x), fmaxf(max.y, stats[t].y));
    }
    float2 weights[C::kTeams];
#pragma unroll
    for (int t = 0; t < C::kTeams; ++t) {
      weights[t] =
          make_float2(Exp2(stats[t].x - FiniteOr0(max.x)), Exp2(stats[t].y - FiniteOr0(max.y)));
      sum.x = fmaf(stats[t].z, weights[t].x, sum.x);
      sum.y = fmaf(stats[t].w, weights[t].y, sum.y);
    }
    const float2 own_weights = team == 0 ? weights[0] : weights[C::kTeams - 1];
    const float2 other_weights = team == 0 ? weights[C::kTeams - 1] : weights[0];
    share->max[m][0] = max.x;
    share->max[m][1] = max.y;
    share->sum[m][0] = sum.x;
    share->sum[m][1] = sum.y;
#pragma unroll
    for (int n = 0; n < C::kShareTiles; ++n) {
      float(&tile)[4] = share->output[m][n];
#pragma unroll
      for (int c = 0; c < 4; ++c) tile[c] = 0;
      if constexpr (C::kTeams == 2) {
        AddWeighted(TileOfHalf<C>(state, team, m, n, C::kShareTiles + n), own_weights, tile);
        AddWeighted(passed.Tile(1 - team, m, n), other_weights, tile);
      } else {
#pragma unroll
        for (int t = 0; t < C::kTeams; ++t) {
          AddWeighted(passed.Tile(t, m, share->first_tile + n), weights[t], tile);
        }
      }
    }
  }
}

// Writes a share as partial results, to be combined with those of the other splits.
template <class C>
__device__ __forceinline__ void WritePartials(const Share<C>& share, const WorkTile& work,
                                              int32_t first_row, const Partials& partials,
                                              const Position<C>& position) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (position.Row(m, i) >= work.row_count) continue;
      const int32_t row = first_row + position.Row(m, i);
      float* const to = partials.output + int64_t{row} * C::kHeadDim + 8 * share.first_tile;
#pragma unroll
      for (int n = 0; n < C::kShareTiles; ++n) {
        *reinterpret_cast<float2*>(to + position.Column(n)) =
            make_float2(share.output[m][n][2 * i], share.output[m][n][2 * i + 1]);
      }
      if (share.first_tile == 0 && position.lane % 4 == 0) {
        partials.max[row] = share.max[m][i];
        partials.sum[row] = share.sum[m][i];
      }
    }
  }
}

// Writes a share to O and LSE. O passes through the warp's own shared memory at `staged`, so that
// it leaves in pieces of 16 bytes.
template <class C>
__device__ __forceinline__ void WriteRows(const Share<C>& share, const WorkTile& work, int kv_head,
                                          RowDivider group, const Position<C>& position,
                                          std::byte* staged) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float factor = InverseOfSum(share.sum[m][i]);
      const int row = m * 16 + position.lane / 4 + 8 * i;
      auto* const to = reinterpret_cast<uint32_t*>(staged + row * C::kStagedPitch);
#pragma unroll
      for (int n = 0; n < C::kShareTiles; ++n) {
        const float(&tile)[4] = share.output[m][n];
        to[position.Column(n) / 2] = ElementTraits<typename C::Element>::Pack(
            tile[2 * i] * factor, tile[2 * i + 1] * factor);
      }
    }
  }
  __syncwarp();
  const int first_row = position.row_warp * C::kWarpRows;
#pragma unroll
  for (int begin = 0; begin < C::kWarpRows * C::kShareTiles; begin += 32) {
    const int row = (begin + position.lane) / C::kShareTiles;
    const int piece = (begin + position.lane) % C::kShareTiles;
    if (row >= C::kWarpRows || first_row + row >= work.row_count) break;
    const OutputRow to(group, kv_head, work.row_begin + first_row + row);
    reinterpret_cast<uint4*>(to.Output(work))[share.first_tile + piece] =
        reinterpret_cast<const uint4*>(staged + row * C::kStagedPitch)[piece];
  }
  if (work.lse == nullptr || share.first_tile > 0 || position.lane % 4 > 0) return;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = position.Row(m, i);
      if (row >= work.row_count) continue;
      *OutputRow(group, kv_head, work.row_begin + row).Lse(work) =
          LogSumExp(share.max[m][i], share.sum[m][i]);
    }
  }
}

// Writes the results of a block. Takes shared memory over from the main loop.
template <class C>
__device__ __forceinline__ void WriteResults(const SoftmaxScale& scale, const WorkTile& work,
                                             int kv_head, RowDivider group,
                                             const Partials& partials, const Position<C>& position,
                                             std::byte* shared, const State<C>& state) {
  Share<C> share;
  MergeTeams<C>(scale, position, state, shared, &share);
  if (work.num_splits > 1) {
    WritePartials<C>(share, work, work.PartialRow(kv_head, work.split), partials, position);
  } else {
    const int warp = position.team * C::kRowWarps + position.row_warp;
    WriteRows<C>(share, work, kv_head, group, position,
                 shared + C::kStagedOffset + warp * C::kWarpRows * C::kStagedPitch);
  }
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_EPILOGUE_CUH_
