// The main loop: attends the packed rows of a work tile to its K/V tiles.
//
// Phase g has the K/V tiles g, g + kPhases, ... and its own online softmax. Either each phase
// has a warp group, and groups do not wait for each other: while one multiplies, another can be in
// its softmax. Or one group attends the phases one after the other, and stashes the first's state.
// In a run of kAddsPhases, group g attends the phases of split g so, and adds them up.
//
// A stage of shared memory holds K of a group's tile i and V of its tile i - 1. cp.async fills the
// stages kStages - 1 steps ahead. Step i of a group:
//
//   both        wait for stage i; barrier of the group, which has left stage i - 1; refill that one
//   serial      O += P V[i - 1]; S = Q K[i]^T; mask; update row max; P = exp(S)
//   pipelined   S' = Q K[i]^T beside P = exp(S); O += P V[i - 1]; S = S'; mask; update row max
//
// The pipelined mainloop keeps the scores of two tiles, S and S', in registers.
//
// With single buffers, or n (kBuffers) each for K and for V, which are copied in turn. Step i:
//
//   wait for K[i]; barrier; ask for V[i + n - 1]; S = Q K[i]^T; mask
//   wait for V[i]; barrier; ask for K[i + n]; update row max; P = exp(S); O += P V[i]
//
// With kCopiesEarly, it refills a buffer as soon as it has left it: one more barrier each.
//
//   wait for K[i]; barrier; S = Q K[i]^T; mask; barrier; ask for K[i + n]
//   wait for V[i]; barrier; update row max; P = exp(S); O += P V[i]; barrier; ask for V[i + n]
//
// Q is asked for first, and nothing else is waited for before the first step: Q's codes and
// registers are made while K and V are on their way.
//
// With kCodes, the group's threads write the tile's RowFactors after Q K^T, and scale and mask its
// scores behind the barrier that follows: the one for V, or in the serial loop one of its own.
#ifndef FLASHCORE_KERNELS_SM80_MAINLOOP_CUH_
#define FLASHCORE_KERNELS_SM80_MAINLOOP_CUH_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/work_list.h"
#include "kernels/sm80/accumulators.cuh"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/epilogue.cuh"
#include "kernels/sm80/kv_buffers.cuh"
#include "kernels/sm80/kv_ring.cuh"
#include "kernels/sm80/mask.cuh"
#include "kernels/sm80/phase_sums.cuh"
#include "kernels/sm80/ptx.cuh"
#include "kernels/sm80/query_codes.cuh"
#include "kernels/sm80/score_scale.cuh"
#include "kernels/sm80/scores.cuh"
#include "kernels/sm80/shared_tile.cuh"
#include "kernels/sm80/softmax.cuh"
#include "kernels/sm80/stash.cuh"
#include "kernels/sm80/thread.cuh"
#include "kernels/sm80/values.cuh"

namespace flashcore::kernels::sm80 {

template <class C>
__device__ __forceinline__ void SerialMainloop(const SoftmaxScale& scale, const Work& work,
                                               const TileMask<C>& mask,
                                               const ThreadPosition<C>& thread, KvRing<C>* kv,
                                               QueryOperands<C>* query, State<C>* state) {
  const int num_tiles = kv->NumTiles();
  const RowFactors<C> factors(thread);
  Probabilities<C> probabilities;
#pragma unroll 1
  for (int step = 0; step <= num_tiles; ++step) {
    kv->Advance(step);
    if constexpr (C::kCodes) {
      if (step < num_tiles) factors.Write(work, kv->Key(step) + C::kTileBytes);
    }
    if (step > 0) {
      AddValues<C>(probabilities, kv->Value(step), thread.lane, state);
      EndTile<C>(kv->KvRow(step - 1), state);
    }
    if (step == num_tiles) break;
    float scores[C::kRowTiles][C::kScoreTiles][4];
    ComputeScores<C>(query, kv->Key(step), thread, scores);
    if constexpr (C::kCodes) SyncWarpGroup<C>();
    TransformScores<C>(factors, mask, kv->KvRow(step), scores);
    float largest[C::kRowTiles][2];
    UpdateRowMax<C>(scale, scores, state, largest);
    ComputeProbabilities<C>(scale, scores, largest, factors, state, &probabilities);
  }
}

// `sums`: receives all phases but the last; null without kAddsPhases.
template <class C>
__device__ __forceinline__ void SingleBufferMainloop(const SoftmaxScale& scale, const Work& work,
                                                     const Partials& partials,
                                                     const TileMask<C>& mask, KvBuffers<C>* kv,
                                                     QueryOperands<C>* query, State<C>* state,
                                                     PhaseSums<C>* sums) {
#pragma unroll 1
  for (int32_t row = kv->First(); kv->Has(row);) {
    const int32_t next = kv->AwaitKey();
    // Places in shared memory that are computed for each tile need no registers between tiles.
    const ThreadPosition<C> thread;
    const int lane = thread.lane;
    query->MoveTo(thread);
    float scores[C::kRowTiles][C::kScoreTiles][4];
    ComputeScores<C>(query, kv->Key(), thread, scores);
    if constexpr (C::kCodes) {
      RowFactors<C>(thread).Write(work, kv->Key() + C::kTileBytes);
    } else {
      TransformScores<C>(RowFactors<C>(thread), mask, row, scores);
    }
    kv->AwaitValue();
    const RowFactors<C> factors(thread);
    if constexpr (C::kCodes) TransformScores<C>(factors, mask, row, scores);
    float largest[C::kRowTiles][2];
    UpdateRowMax<C>(scale, scores, state, largest);
    Probabilities<C> probabilities;
    ComputeProbabilities<C>(scale, scores, largest, factors, state, &probabilities);
    AddValues<C>(probabilities, kv->Value(), lane, state);
    kv->LeaveValue();
    EndTile<C>(row, state);
    if constexpr (C::kStashes || C::kAddsPhases) {
      if (kv->EndsPhase(row, next)) {
        FinishState<C>(state);
        if constexpr (C::kStashes) {
          Stash<C>().Store(scale, *state);
        } else {
          sums->Add(scale, *state);
        }
        *state = State<C>();
      }
    }
    if constexpr (C::kAddsSplits) {
      if (kv->EndsSplit(next)) {
        FinishState<C>(state);
        WriteRun<C>(scale, work, kv->IsFirstSplit(), partials, *state);
        *state = State<C>();
        kv->NextSplit();
      }
    }
    row = next;
  }
}

// Q K^T of a tile and the exponentials of the tile before are one stretch of code without branches,
// so that the compiler interleaves them. After the last tile, Q K^T of whatever is in shared memory
// is computed and never used.
template <class C>
__device__ __forceinline__ void PipelinedMainloop(const SoftmaxScale& scale, const Work& work,
                                                  const TileMask<C>& mask,
                                                  const ThreadPosition<C>& thread, KvRing<C>* kv,
                                                  QueryOperands<C>* query, State<C>* state) {
  float scores[C::kRowTiles][C::kScoreTiles][4];
  const RowFactors<C> unused(thread);
  kv->Advance(0);
  if (kv->Has(kv->KvRow(0))) {
    ComputeScores<C>(query, kv->Key(0), thread, scores);
  }
#pragma unroll 1
  for (int step = 1; kv->Has(kv->KvRow(step - 1)); ++step) {
    TransformScores<C>(unused, mask, kv->KvRow(step - 1), scores);
    float largest[C::kRowTiles][2];
    UpdateRowMax<C>(scale, scores, state, largest);
    kv->Advance(step);

    float next[C::kRowTiles][C::kScoreTiles][4];
    ComputeScores<C>(query, kv->Key(step), thread, next);
    Probabilities<C> probabilities;
    ComputeProbabilities<C>(scale, scores, largest, unused, state, &probabilities);
    AddValues<C>(probabilities, kv->Value(step), thread.lane, state);
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

// Computes the outcome of this warp's rows: the sum of its group's phases, or else the state for
// the last of them, of a run in the last split. Returns with no copy in flight and shared memory
// free for reuse.
template <class C>
__device__ __forceinline__ void RunMainloop(const Work& work, RowDivider group,
                                            const Partials& partials, const SoftmaxScale& scale,
                                            Outcome<C>* outcome) {
  const ThreadPosition<C> thread;
  std::byte* const memory = SharedMemory();
  const uint32_t shared = SharedAddress(memory);
  using Kv = std::conditional_t<C::kSingleBuffers, KvBuffers<C>, KvRing<C>>;
  Kv kv(work, shared + C::kStagesOffset);
  CopyQueryAsync<C>(work, KvHead(), group, shared + C::kQueryOffset);
  CommitCopies();
  kv.Prefill();
  const TileMask<C> mask(work, group, memory + C::kVisibleOffset);
  WaitForCopies<Kv::kPrefilled>();
  __syncthreads();
  if constexpr (C::kQueryParts > 0) {
    QuantiseQuery<C>(work, memory + C::kQueryOffset,
                     reinterpret_cast<float*>(memory + C::kQueryFactorOffset));
  } else if (work.span.terms.softmax_scale < 0) {
    NegateQuery<C>(memory + C::kQueryOffset);
  }
  QueryOperands<C> query(shared + C::kQueryOffset, thread);
  if constexpr (C::kQueryInStages) __syncthreads();

  if constexpr (C::kAddsPhases) {
    State<C> state;
    SingleBufferMainloop<C>(scale, work, partials, mask, &kv, &query, &state, outcome);
    FinishState<C>(&state);
    outcome->Add(scale, state);
  } else if constexpr (C::kSingleBuffers) {
    SingleBufferMainloop<C>(scale, work, partials, mask, &kv, &query, outcome, nullptr);
  } else if constexpr (C::kPipelined) {
    PipelinedMainloop<C>(scale, work, mask, thread, &kv, &query, outcome);
  } else {
    SerialMainloop<C>(scale, work, mask, thread, &kv, &query, outcome);
  }
  // compute-sanitizer's racecheck reports false hazards if warps pass different numbers of named
  // barriers before __syncthreads, so a group without a last tile passes its barriers.
  if constexpr (C::kWarpGroups > 1 && C::kRowWarps > 1) {
    if (kv.IsOneTileShort(thread.warp_group)) {
      SyncWarpGroup<C>();
      if constexpr (C::kSingleBuffers || C::kCodes) SyncWarpGroup<C>();
    }
  }
  if constexpr (!C::kAddsPhases) FinishState<C>(outcome);
  __syncthreads();
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_MAINLOOP_CUH_
