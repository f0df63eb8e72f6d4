// The main loop: every K/V tile of a work item against the item's query rows.
//
// The teams of a block take turns in the item's tiles: team t has tiles t, t + kTeams, ..., and
// attends all of the item's rows to them, with a softmax of its own. So the teams need not wait for
// each other, and while one multiplies another may be busy with its softmax. But where the block's
// tiles are not a multiple of kTeams, teams without a last one still pass the barriers of that
// step: compute-sanitizer's racecheck loses count when warps pass different numbers of partial
// barriers before one of the whole block, and reports what that keeps apart.
//
// A team's loop goes in steps: step i multiplies Q K^T of its tile i, takes the exponentials of
// tile i - 1 and multiplies P V of that. So V of one tile and K of the next come together, through
// a ring of kStages pairs of buffers, each pair's copies a group of their own. Before using a pair
// a thread waits for its own copies of it, then for those of the team's other threads. The same
// barrier tells that all of them have left the pair of the step before, which is filled again next.
#ifndef FLASHCORE_KERNELS_SM80_MAINLOOP_CUH_
#define FLASHCORE_KERNELS_SM80_MAINLOOP_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/mask.cuh"
#include "kernels/sm80/operands.cuh"
#include "kernels/sm80/ptx.cuh"
#include "kernels/sm80/shared_tile.cuh"
#include "kernels/sm80/softmax.cuh"
#include "kernels/smxx/element.cuh"
#include "kernels/smxx/work_list.h"

namespace flashcore::kernels::sm80 {

// A team's K/V tiles, on their way from global memory to shared memory.
template <class C>
class TileRing {
 public:
  __device__ __forceinline__ TileRing(const WorkTile& work, int kv_head, int team, uint32_t shared)
      : work_(work),
        first_row_(FirstRow(work.kv_begin, team)),
        kv_end_(work.kv_end),
        key_(work.key + kv_head * work.kv_head_stride + TileCopy<C>::Offset(work.kv_row_stride)),
        value_(work.value + (key_ - work.key)),
        pairs_(shared + team * 2 * C::kTileBytes) {
    key_offset_ = Offset(0);
  }

  __device__ __forceinline__ int NumTiles() const {
    return max(0, kv_end_ - first_row_ + kStride - 1) / kStride;
  }

  // The same of the team that has most.
  __device__ __forceinline__ int MaxTiles() const {
    return (kv_end_ - work_.kv_begin + kStride - 1) / kStride;
  }

  // The first K/V row of all teams' tiles number `tile`.
  __device__ __forceinline__ int32_t FirstRowOfTeams(int tile) const {
    return work_.kv_begin + tile * kStride;
  }

  // Whether the team has a tile number `tile`.
  __device__ __forceinline__ bool Has(int tile) const { return tile >= 0 && KvRow(tile) < kv_end_; }

  // K/V row of the team's tile number `tile`.
  __device__ __forceinline__ int32_t KvRow(int tile) const { return first_row_ + tile * kStride; }

  // Starts the copies of the first kStages - 1 steps.
  __device__ __forceinline__ void Start() {
#pragma unroll
    for (int step = 0; step < C::kStages - 1; ++step) Copy(step, Stage(step));
  }

  // Waits until the pair of step number `step` is there and the team has left that of the step
  // before; starts the copies into that.
  __device__ __forceinline__ void Next(int step, int team) {
    WaitForCopies<C::kStages - 2>();
    SyncTeam<C>(team);
    Copy(step + C::kStages - 1, Stage(step + C::kStages - 1));
  }

  // V of tile step - 1 and K of tile `step`, in shared memory.
  __device__ __forceinline__ uint32_t Value(int step) const { return pairs_ + Stage(step); }
  __device__ __forceinline__ uint32_t Key(int step) const { return Value(step) + C::kTileBytes; }

 private:
  static __device__ __forceinline__ int Stage(int step) {
    return step % C::kStages * C::kStageStride;
  }

  static constexpr int kStride = C::kTeams * C::kTileTokens;  // rows from a tile to the next

  // Starts the copies of a step and closes their group, which is empty if nothing is left to copy.
  __device__ __forceinline__ void Copy(int step, int stage) {
    if (Has(step - 1)) {
      TileCopy<C>::Start(value_ + value_offset_, work_.kv_row_stride, kv_end_ - KvRow(step - 1),
                         pairs_ + stage);
    }
    if (Has(step)) {
      TileCopy<C>::Start(key_ + key_offset_, work_.kv_row_stride, kv_end_ - KvRow(step),
                         pairs_ + stage + C::kTileBytes);
    }
    CommitCopies();
    value_offset_ = key_offset_;
    key_offset_ = Offset(step + 1);  // early: it may be on its way from memory
  }

  // Whose tile is whose follows from its place in the K/V alone, not from where the work begins.
  static __device__ __forceinline__ int32_t FirstRow(int32_t kv_begin, int team) {
    const int turn = kv_begin / C::kTileTokens;  // kTeams is a power of 2
    return kv_begin + ((team - turn) & (C::kTeams - 1)) * C::kTileTokens;
  }

  // Where the tile lies, in bytes from K's and V's first; 0 if there is no such tile.
  __device__ __forceinline__ int64_t Offset(int tile) const {
    if (!Has(tile)) return 0;
    const int32_t row = KvRow(tile);
    const int32_t page = row / kPageTokens;
    const int64_t offset = (work_.pages != nullptr ? work_.pages[page] : page) * work_.page_stride;
    if constexpr (C::kTileTokens == kPageTokens) return offset;
    return offset + row % kPageTokens * work_.kv_row_stride;
  }

  const WorkTile& work_;  // what is needed once a step is read then, and takes no registers
  const int32_t first_row_;
  const int32_t kv_end_;
  const std::byte* const key_;
  const std::byte* const value_;
  const uint32_t pairs_;
  int64_t key_offset_;  // of the tiles that are copied next
  int64_t value_offset_;
};

// A warp's query rows as operands of Q K^T.
template <class C>
class QueryOperands {
 public:
  __device__ __forceinline__ QueryOperands(uint32_t tile, const Position<C>& position)
      : address_(QueryAddress<C>(tile, position.row_warp * C::kWarpRows, position.lane)) {
    if constexpr (C::kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < C::kSteps; ++step) Load(step, registers_[step]);
    }
  }

  // Those of a step of K, for each row tile.
  __device__ __forceinline__ const uint32_t (&Get(int step))[C::kRowTiles][C::kStepOperands][4] {
    if constexpr (C::kQueryInRegisters) {
      return registers_[step];
    } else {
      Load(step, registers_[0]);
      return registers_[0];
    }
  }

 private:
  __device__ __forceinline__ void Load(int step,
                                       uint32_t (&rows)[C::kRowTiles][C::kStepOperands][4]) const {
#pragma unroll
    for (int k = 0; k < C::kStepOperands; ++k) {
      const uint32_t address = StepAddress<C::kHeadDim>(address_, C::kStepOperands * step + k);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        LoadQuery<C>(TokenAddress<C::kHeadDim>(address, m), rows[m][k]);
      }
    }
  }

  const uint32_t address_;
  uint32_t registers_[C::kQueryInRegisters ? C::kSteps : 1][C::kRowTiles][C::kStepOperands][4];
};

// scores = Q K^T of the warp's rows and the tile's tokens.
template <class C>
__device__ __forceinline__ void ComputeScores(QueryOperands<C>* query, uint32_t keys, int lane,
                                              float (&scores)[C::kRowTiles][C::kScoreTiles][4]) {
  using Element = typename C::Element;
  keys = KeyAddress<C>(keys, lane);
  Accumulators<typename C::Sum> sums[C::kRowTiles][C::kScoreTiles];
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kScoreTiles; ++n) sums[m][n].Clear();
  }
#pragma unroll C::kScoreUnroll
  for (int step = 0; step < C::kSteps; ++step) {
    const auto& rows = query->Get(step);
    const uint32_t address = StepAddress<C::kKvWidth>(keys, step);
#pragma unroll
    for (int n = 0; n < C::kScoreTiles / 2; ++n) {
      uint32_t key[2][C::kStepOperands][2];
      LoadKeys<C>(TokenAddress<C::kKvWidth>(address, n), key);
#pragma unroll
      for (int k = 0; k < C::kStepOperands; ++k) {
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          MultiplyAdd<Element>(rows[m][k], key[0][k][0], key[0][k][1], sums[m][2 * n].sums);
          MultiplyAdd<Element>(rows[m][k], key[1][k][0], key[1][k][1], sums[m][2 * n + 1].sums);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kScoreTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) scores[m][n][c] = sums[m][n].Get(c);
    }
  }
}

// output += P V, and rounded_sum += P 1.
template <class C>
__device__ __forceinline__ void AddValues(const Probabilities<C>& probabilities, uint32_t values,
                                          int lane, State<C>* state) {
  using Element = typename C::Element;
  values = ValueAddress<C>(values, lane);
#pragma unroll
  for (int n = 0; n < C::kTileTokens / 16; ++n) {
    constexpr uint32_t kOnes = ElementTraits<Element>::kOnes;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      MultiplyAdd<Element>(probabilities.rows[m][n], kOnes, kOnes, state->rounded_sum[m]);
    }
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      constexpr int kTiles = 2 * C::kStepOperands;
      uint32_t value[kTiles][2];
      LoadValues<C>(TokenAddress<C::kKvWidth>(StepAddress<C::kKvWidth>(values, step), n), value);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (int k = 0; k < kTiles; ++k) {
          MultiplyAdd<Element>(probabilities.rows[m][n], value[k][0], value[k][1],
                               state->output[m][kTiles * step + k].sums);
        }
      }
    }
  }
}

// HideNonFinite of the tile whose V comes with step number `step`, in which all teams take part.
template <class C>
__device__ __forceinline__ void HideNonFiniteOfStep(const TileMask<C>& mask,
                                                    const Position<C>& position,
                                                    const TileRing<C>& ring, int step,
                                                    std::byte* memory, State<C>* state) {
  const int tile = step - 1;
  if (!mask.Hides(C::kTeamsVote ? ring.FirstRowOfTeams(tile) : ring.KvRow(tile))) return;
  HideNonFinite<C>(mask, position, ring.KvRow(tile), memory, ring.Value(step), state);
}

// Attends to the team's tiles one after the other: a step is P V of one tile, then Q K^T and the
// softmax of the next.
template <class C>
__device__ __forceinline__ void AttendInTurn(const SoftmaxScale& scale, const TileMask<C>& mask,
                                             const Position<C>& position, std::byte* memory,
                                             TileRing<C>* ring, QueryOperands<C>* query,
                                             State<C>* state) {
  const int num_tiles = ring->NumTiles();
  Probabilities<C> probabilities;
#pragma unroll 1
  for (int step = 0; step <= num_tiles; ++step) {
    ring->Next(step, position.team);
    if (step > 0) {
      HideNonFiniteOfStep<C>(mask, position, *ring, step, memory, state);
      AddValues<C>(probabilities, ring->Value(step), position.lane, state);
    }
    if (step == num_tiles) break;
    float scores[C::kRowTiles][C::kScoreTiles][4];
    ComputeScores<C>(query, ring->Key(step), position.lane, scores);
    MaskScores<C>(mask, position, ring->KvRow(step), scores);
    RaiseMaxima<C>(scale, scores, state);
    ComputeProbabilities<C>(scale, scores, state, &probabilities);
  }
}

// The same, with Q K^T of a tile beside the exponentials of the one before, which then wait for
// both in registers: multiplications and exponentials of a step are one stretch of code without
// branches. So after the last tile, Q K^T of whatever lies in the place of the next is multiplied
// for nothing.
template <class C>
__device__ __forceinline__ void AttendLookingAhead(const SoftmaxScale& scale,
                                                   const TileMask<C>& mask,
                                                   const Position<C>& position, std::byte* memory,
                                                   TileRing<C>* ring, QueryOperands<C>* query,
                                                   State<C>* state) {
  const int num_tiles = ring->NumTiles();
  float scores[C::kRowTiles][C::kScoreTiles][4];
  ring->Next(0, position.team);
  if (num_tiles > 0) ComputeScores<C>(query, ring->Key(0), position.lane, scores);
#pragma unroll 1
  for (int step = 1; step <= num_tiles; ++step) {
    MaskScores<C>(mask, position, ring->KvRow(step - 1), scores);
    RaiseMaxima<C>(scale, scores, state);
    ring->Next(step, position.team);
    HideNonFiniteOfStep<C>(mask, position, *ring, step, memory, state);

    float next[C::kRowTiles][C::kScoreTiles][4];
    ComputeScores<C>(query, ring->Key(step), position.lane, next);
    Probabilities<C> probabilities;
    ComputeProbabilities<C>(scale, scores, state, &probabilities);
    AddValues<C>(probabilities, ring->Value(step), position.lane, state);
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < C::kScoreTiles; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) scores[m][n][c] = next[m][n][c];
      }
    }
  }
}

// Attends the item's rows to the team's share of its K/V. Leaves no copy under way, and nobody
// reading shared memory.
template <class C>
__device__ __forceinline__ void AttendTiles(const WorkTile& work, int kv_head, RowDivider group,
                                            const SoftmaxScale& scale, const Position<C>& position,
                                            std::byte* memory, State<C>* state) {
  const uint32_t shared = SharedAddress(memory);
  TileRing<C> ring(work, kv_head, position.team, shared);
  ring.Start();
  CopyQueryAsync<C>(work, kv_head, group, shared + C::kQueryOffset);
  CommitCopies();
  const TileMask<C> mask(work, group, memory + C::kSeenOffset);
  WaitForCopies<0>();
  __syncthreads();
  if (work.softmax_scale < 0) NegateQuery<C>(memory + C::kQueryOffset);
  QueryOperands<C> query(shared + C::kQueryOffset, position);
  if constexpr (C::kQueryInStages) __syncthreads();

  if constexpr (C::kLooksAhead) {
    AttendLookingAhead<C>(scale, mask, position, memory, &ring, &query, state);
  } else {
    AttendInTurn<C>(scale, mask, position, memory, &ring, &query, state);
  }
  if (C::kTeamsVote && ring.NumTiles() < ring.MaxTiles()) {
    const int step = ring.MaxTiles();
    SyncTeam<C>(position.team);
    HideNonFiniteOfStep<C>(mask, position, ring, step, memory, state);
  }
  FinishSoftmax<C>(state);
  FinishOutput<C>(work, kv_head, state);
  __syncthreads();
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_MAINLOOP_CUH_
