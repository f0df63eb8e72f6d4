// The main loop: attends the packed rows of a work tile to its K/V tiles.
//
// Stream g has the K/V tiles g, g + kStreams, ... and its own online softmax. Either each stream
// has a warp group, and groups do not wait for each other: while one multiplies, another can be in
// its softmax. Or one group attends the streams one after the other, and stashes the first's state.
// In a run of kAddsStreams, group g attends the streams of split g so, and adds them up.
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

#include "kernels/attention.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/work_list.h"
#include "kernels/half.h"
#include "kernels/sm80/accumulators.cuh"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/epilogue.cuh"
#include "kernels/sm80/mask.cuh"
#include "kernels/sm80/operands.cuh"
#include "kernels/sm80/ptx.cuh"
#include "kernels/sm80/query_codes.cuh"
#include "kernels/sm80/score_scale.cuh"
#include "kernels/sm80/shared_tile.cuh"
#include "kernels/sm80/softmax.cuh"
#include "kernels/sm80/stash.cuh"
#include "kernels/sm80/stream_sums.cuh"

namespace flashcore::kernels::sm80 {

// Copies K/V tiles of the work tile from global to shared memory.
template <class C>
class KvTiles {
 public:
  __device__ __forceinline__ explicit KvTiles(const Work& work)
      : work_(work),
        kv_begin_(GroupBegin(work.tile)),
        kv_end_(GroupEnd(work.tile)),
        kv_head_(KvHead()) {}

  // Whether there is a tile that begins at this K/V row.
  __device__ __forceinline__ bool Has(int32_t row) const { return row < kv_end_; }

  // Whether the stream has a tile less than the one that has most.
  __device__ __forceinline__ bool IsOneTileShort(int stream) const {
    return NumTiles(StreamBegin(stream)) < NumTiles(kv_begin_);
  }

 protected:
  static constexpr int kStride = C::kStreams * C::kTileTokens;  // rows between a stream's tiles

  // Tiles of a stream whose first one is at `begin`.
  __device__ __forceinline__ int NumTiles(int32_t begin) const {
    return max(0, kv_end_ - begin + kStride - 1) / kStride;
  }

  // First row of a stream: every kStreams-th tile is its. A tile's stream depends only on its place
  // in the K/V, not on where the work tile begins.
  __device__ __forceinline__ int32_t StreamBegin(int stream) const {
    const int tile = kv_begin_ / C::kTileTokens;  // kStreams is a power of 2
    return kv_begin_ + ((stream - tile) & (C::kStreams - 1)) * C::kTileTokens;
  }

  // The page of the tile at a row; 0 if there is no such tile.
  __device__ __forceinline__ int32_t Page(int32_t row) const {
    return Has(row) ? work_.span.PageOf(row) : 0;
  }

  // Starts copying this thread's part of a tile of K or V, which is in `page`, to a shared address.
  __device__ __forceinline__ void CopyTile(const std::byte* WorkSpan::*tensor, int32_t page,
                                           int32_t row, uint32_t to) const {
    const TileCopy<C> copy;
    const WorkSpan& span = work_.span;
    const std::byte* from = span.*tensor;
    if constexpr (C::kCodes) {
      // Constants and 32 bits, as far as they do, for fewer instructions in the loop of a decode.
      from += page * span.page_stride;
      from +=
          static_cast<uint32_t>(kv_head_ * C::kHeadPageBytes + row % kPageTokens * C::kKvRowBytes) +
          copy.Offset(C::kKvRowBytes);
      copy.CopyAsync(from, C::kKvRowBytes, kv_end_ - row, to);
      return;
    }
    from += kv_head_ * span.kv_head_stride + copy.Offset(span.kv_row_stride);
    from += page * span.page_stride;
    if constexpr (C::kTileTokens != kPageTokens) from += row % kPageTokens * span.kv_row_stride;
    copy.CopyAsync(from, span.kv_row_stride, kv_end_ - row, to);
  }

  // The same of K, with the scales of its rows and of V's.
  __device__ __forceinline__ void CopyKeyTile(int32_t page, int32_t row, uint32_t to) const {
    CopyTile(&WorkSpan::key, page, row, to);
    if constexpr (C::kCodes) {
      const WorkSpan& span = work_.span;
      const int64_t scales =
          page * span.page_stride +
          static_cast<uint32_t>(kv_head_ * C::kHeadPageBytes + kPageTokens * C::kKvRowBytes +
                                row % kPageTokens * 2);
      TileCopy<C>::CopyScalesAsync(span.key + scales, span.value + scales, kv_end_ - row,
                                   to + C::kTileBytes);
    }
  }

  // Whether the warp group attends a split of a run by itself.
  static __device__ __forceinline__ bool HasOwnSplit(const WorkTile& tile) {
    return C::kAddsStreams && tile.IsRun();
  }

  const Work work_;
  const int32_t kv_begin_;  // of the group
  const int32_t kv_end_;

 private:
  static __device__ __forceinline__ int32_t GroupBegin(const WorkTile& tile) {
    if (!HasOwnSplit(tile)) return tile.kv_begin;
    return tile.kv_begin + ThreadPosition<C>().warp_group * tile.split_rows;
  }
  static __device__ __forceinline__ int32_t GroupEnd(const WorkTile& tile) {
    if (!HasOwnSplit(tile)) return tile.kv_end;
    return min(tile.kv_end, GroupBegin(tile) + tile.split_rows);
  }

  const int kv_head_;
};

// The stages of a warp group, filled kStages - 1 steps ahead with the tiles of the group's stream.
template <class C>
class KvRing : public KvTiles<C> {
 public:
  __device__ __forceinline__ KvRing(const Work& work, uint32_t shared)
      : KvTiles<C>(work),
        first_row_(this->StreamBegin(ThreadPosition<C>().warp_group)),
        stages_(shared + ThreadPosition<C>().warp_group * C::kGroupBytes) {
    key_page_ = this->Page(first_row_);
  }

  __device__ __forceinline__ int NumTiles() const { return KvTiles<C>::NumTiles(first_row_); }

  // First K/V row of the group's tile `tile`.
  __device__ __forceinline__ int32_t KvRow(int tile) const { return first_row_ + tile * kStride; }

  // Starts the copies of the first steps, a cp.async group each.
  static constexpr int kPrefilled = C::kStages - 1;
  __device__ __forceinline__ void Prefill() {
#pragma unroll
    for (int step = 0; step < kPrefilled; ++step) CopyStage(step);
  }

  // Waits until the stage of `step` is filled and the group has left the stage before; refills that
  // one for step + kStages - 1.
  __device__ __forceinline__ void Advance(int step) {
    WaitForCopies<C::kStages - 2>();
    SyncWarpGroup<C>();
    CopyStage(step + C::kStages - 1);
  }

  // Shared addresses of V of tile step - 1 and K of tile `step`.
  __device__ __forceinline__ uint32_t Value(int step) const { return stages_ + Stage(step); }
  __device__ __forceinline__ uint32_t Key(int step) const { return Value(step) + C::kTileBytes; }

  // Where the stage of `step` begins in shared memory.
  static __device__ __forceinline__ int Stage(int step) {
    return step % C::kStages * C::kStageStride;
  }

 private:
  using KvTiles<C>::kStride;

  // Starts the copies of a step and ends their cp.async group, which is empty after the last tile.
  __device__ __forceinline__ void CopyStage(int step) {
    const int32_t row = KvRow(step);
    if (step > 0 && this->Has(row - kStride)) {
      this->CopyTile(&WorkSpan::value, value_page_, row - kStride, Value(step));
    }
    if (this->Has(row)) this->CopyKeyTile(key_page_, row, Key(step));
    CommitCopies();
    value_page_ = key_page_;
    key_page_ = this->Page(row + kStride);  // a step ahead: it may come from memory
  }

  const int32_t first_row_;
  const uint32_t stages_;
  int32_t key_page_;  // of the tiles to copy next
  int32_t value_page_;
};

// The K and V buffers of a warp group, kBuffers of each, for its stream or for several one after
// the other.
template <class C>
class KvBuffers : public KvTiles<C> {
 public:
  __device__ __forceinline__ KvBuffers(const Work& work, uint32_t shared)
      : KvTiles<C>(work),
        shared_(shared + ThreadPosition<C>().warp_group * C::kGroupBytes),
        split_end_(work.tile.kv_begin + work.tile.split_rows) {
    if constexpr (C::kBuffers == 2) has_all_streams_ = C::kStashes || this->HasOwnSplit(work.tile);
    to_copy_ = First();
    page_ = this->Page(to_copy_);
  }

  // First K/V row of the first tile.
  __device__ __forceinline__ int32_t First() const {
    return HasAllStreams() ? FirstOfStreams(0) : this->StreamBegin(ThreadPosition<C>().warp_group);
  }

  // Whether another stream begins at `next`, after the tile at `row`.
  __device__ __forceinline__ bool EndsStream(int32_t row, int32_t next) const {
    return HasAllStreams() && Stream(row) != Stream(next) && this->Has(next);
  }

  // Whether the next split of a run begins at `next`.
  __device__ __forceinline__ bool EndsSplit(int32_t next) const {
    return next == split_end_ && this->Has(next);
  }
  __device__ __forceinline__ void NextSplit() { split_end_ += this->work_.tile.split_rows; }
  __device__ __forceinline__ bool IsFirstSplit() const {
    return split_end_ == this->work_.tile.kv_begin + this->work_.tile.split_rows;
  }

  // Starts the copies that come before the first step: kPrefilled cp.async groups.
  static constexpr int kPrefilled = 2 * C::kBuffers - (C::kCopiesEarly ? 0 : 1);
  __device__ __forceinline__ void Prefill() {
#pragma unroll
    for (int n = 0; n < kPrefilled; ++n) {
      if (n % 2 == 0) {
        CopyKey();
      } else {
        CopyValue();
      }
    }
  }

  // Waits for K of the next tile, the first call for that of the first. Returns the first K/V row
  // of the tile after it.
  __device__ __forceinline__ int32_t AwaitKey() {
    WaitForCopies<kPrefilled - 1>();
    SyncWarpGroup<C>();
    if constexpr (!C::kCopiesEarly) CopyValue();
    return C::kBuffers == 2 ? next_ : to_copy_;
  }

  // Then, after the last use of K, waits for V of the same tile.
  __device__ __forceinline__ void AwaitValue() {
    if constexpr (C::kCopiesEarly) {
      SyncWarpGroup<C>();
      CopyKey();
    }
    WaitForCopies<kPrefilled - 1>();
    SyncWarpGroup<C>();
    if constexpr (!C::kCopiesEarly) CopyKey();
  }

  // After the last use of V.
  __device__ __forceinline__ void LeaveValue() {
    if constexpr (C::kCopiesEarly) {
      SyncWarpGroup<C>();
      CopyValue();
    }
  }

  // Shared addresses of V and K of the tile that was waited for.
  __device__ __forceinline__ uint32_t Value() const {
    return C::kBuffers == 2 ? shared_ + buffer_ : shared_;
  }
  __device__ __forceinline__ uint32_t Key() const { return Value() + C::kTileBytes; }

 private:
  // First K/V row of the tile after the one at `row`.
  __device__ __forceinline__ int32_t Next(int32_t row) const {
    const int32_t next = row + this->kStride;
    return this->Has(next) || !HasAllStreams() ? next : FirstOfStreams(Stream(row) + 1);
  }

  // Start copying K, and then V, of the next tile to copy, if there is one, to buffers that the
  // group has left.
  __device__ __forceinline__ void CopyKey() {
    if (this->Has(to_copy_)) this->CopyKeyTile(page_, to_copy_, Key());
    CommitCopies();
  }
  __device__ __forceinline__ void CopyValue() {
    if constexpr (C::kBuffers == 2) next_ = to_copy_;
    // With one buffer that is not refilled early, it is the tile that K was waited for.
    const bool exists = (C::kBuffers == 1 && !C::kCopiesEarly) || this->Has(to_copy_);
    const int32_t next = Next(to_copy_);
    if (exists) this->CopyTile(&WorkSpan::value, page_, to_copy_, Value());
    CommitCopies();
    if (exists) to_copy_ = next;
    page_ = this->Page(to_copy_);
    if constexpr (C::kBuffers == 2) buffer_ = C::kStageStride - buffer_;
  }

  // Whether the group attends all streams, one after the other.
  __device__ __forceinline__ bool HasAllStreams() const {
    if constexpr (C::kBuffers == 2) return has_all_streams_;
    return C::kStashes || this->HasOwnSplit(this->work_.tile);
  }
  static __device__ __forceinline__ int Stream(int32_t row) {
    return row / C::kTileTokens % C::kStreams;
  }
  // First K/V row of the first of the streams from `stream` on that has any.
  __device__ __forceinline__ int32_t FirstOfStreams(int stream) const {
    while (stream < C::kStreams && !this->Has(this->StreamBegin(stream))) ++stream;
    return stream < C::kStreams ? this->StreamBegin(stream) : this->kv_end_;
  }

  const uint32_t shared_;
  int32_t split_end_;
  int32_t to_copy_;  // the next tile to copy
  int32_t page_;     // its
  // With two buffers:
  bool has_all_streams_ = false;  // kept, because memory would be read for it
  int32_t next_ = 0;              // the tile before to_copy_
  int32_t buffer_ = 0;            // bytes to the buffers in use
};

// A warp's query rows as operands of Q K^T.
template <class C>
class QueryOperands {
 public:
  __device__ __forceinline__ QueryOperands(uint32_t tile, const ThreadPosition<C>& thread)
      : address_(QueryAddress<C>(tile, thread.row_warp * C::kWarpRows, thread.lane)) {
    if constexpr (C::kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < C::kSteps; ++step) Load(step, registers_[step]);
    }
  }

  // Before the first Get of each tile, in the same thread: finds the rows in shared memory again.
  __device__ __forceinline__ void MoveTo(const ThreadPosition<C>& thread) {
    if constexpr (!C::kQueryInRegisters) {
      address_ = QueryAddress<C>(SharedAddress(SharedMemory()) + C::kQueryOffset,
                                 thread.row_warp * C::kWarpRows, thread.lane);
    }
  }

  // Operands of one step of K, for each row tile.
  __device__ __forceinline__ const QueryOperand<C> (&Get(int step))[C::kRowTiles][C::kQueryMmas] {
    if constexpr (C::kQueryInRegisters) {
      return registers_[step];
    } else {
      Load(step, registers_[0]);
      return registers_[0];
    }
  }

 private:
  __device__ __forceinline__ void Load(int step,
                                       QueryOperand<C> (&rows)[C::kRowTiles][C::kQueryMmas]) const {
#pragma unroll
    for (int k = 0; k < C::kQueryMmas; ++k) {
      const int part = C::kQueryParts > 0 ? C::kSteps * k + step : C::kStepMmas * step + k;
      const uint32_t address = StepAddress<C::kQueryOperandBytes>(address_, part);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        LoadQuery<C>(RowAddress<C::kQueryOperandBytes>(address, m), rows[m][k]);
      }
    }
  }

  uint32_t address_;
  QueryOperand<C> registers_[C::kQueryInRegisters ? C::kSteps : 1][C::kRowTiles][C::kQueryMmas];
};

// scores = Q K^T of codes, times the factors of Q's rows.
template <class C>
__device__ __forceinline__ void MultiplyCodes(QueryOperands<C>* query, uint32_t keys,
                                              const ThreadPosition<C>& thread,
                                              float (&scores)[C::kRowTiles][C::kScoreTiles][4]) {
  keys = KeyAddress<C>(keys, thread.lane);
  // Sums of two parts take twice the registers of the scores.
  constexpr int kTiles = C::kQueryParts == 2 ? 2 : C::kScoreTiles;
  constexpr int kTilesOfLoad = 16 / C::kMmaColumns;
  FirstSums<C::kFloatScoreSums> first;
#pragma unroll
  for (int begin = 0; begin < C::kScoreTiles; begin += kTiles) {
    int32_t sums[C::kRowTiles][C::kQueryParts][kTiles][4];
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      const auto& rows = query->Get(step);
      const uint32_t address = StepAddress<C::kKvRowBytes>(keys, step);
#pragma unroll
      for (int n = 0; n < kTiles; n += kTilesOfLoad) {
        uint32_t key[4];  // of 16 tokens
        LoadMatrices(RowAddress<C::kKvRowBytes>(address, (begin + n) / kTilesOfLoad), key);
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
          for (int part = 0; part < C::kQueryParts; ++part) {
#pragma unroll
            for (int k = 0; k < kTilesOfLoad; ++k) {
              int32_t(&sum)[4] = sums[m][part][n + k];
              const int32_t(&from)[4] = step == 0 ? first.sums : sum;
              if constexpr (C::kTransposed) {
                const uint32_t tokens[4] = {key[0], key[2], key[1], key[3]};
                MmaCodes<int8_t>(tokens, rows[m][part][0], rows[m][part][1], from, sum);
              } else {
                MmaCodes<int8_t>(rows[m][part], key[2 * k], key[2 * k + 1], from, sum);
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      const uint32_t factors = SharedAddress(SharedMemory()) + C::kQueryFactorOffset;
      const float factor[2] = {Load4(factors + thread.Row(m, 0) * 4),
                               Load4(factors + thread.Row(m, 1) * 4)};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          int32_t sum = sums[m][0][n][c];
          float& score = scores[m][begin + n][c];
          const float of_row = factor[RowOfAccumulator<C>(c)];
          if constexpr (C::kFloatScoreSums) {
            score = fmaf(__int_as_float(sum), of_row, of_row * -kIntegerBase);
          } else {
            if constexpr (C::kQueryParts == 2) sum = sum * 256 + sums[m][1][n][c];
            score = static_cast<float>(sum) * of_row;
          }
        }
      }
    }
  }
}

// scores = Q K^T of Elements.
template <class C>
__device__ __forceinline__ void MultiplyElements(QueryOperands<C>* query, uint32_t keys,
                                                 const ThreadPosition<C>& thread,
                                                 float (&scores)[C::kRowTiles][C::kScoreTiles][4]) {
  using Element = typename C::Element;
  keys = KeyAddress<C>(keys, thread.lane);
  Accumulators<typename C::Accum> sums[C::kRowTiles][C::kScoreTiles];
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kScoreTiles; ++n) sums[m][n].Clear();
  }
#pragma unroll C::kScoreUnroll
  for (int step = 0; step < C::kSteps; ++step) {
    const auto& rows = query->Get(step);
    const uint32_t address = StepAddress<C::kKvRowBytes>(keys, step);
#pragma unroll
    for (int n = 0; n < C::kTileTokens / 16; ++n) {
      uint32_t key[2][C::kStepMmas][2];
      LoadKeys<C>(RowAddress<C::kKvRowBytes>(address, n), key);
#pragma unroll
      for (int k = 0; k < C::kStepMmas; ++k) {
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          if constexpr (C::kTransposed) {
            const uint32_t tokens[4] = {key[0][k][0], key[1][k][0], key[0][k][1], key[1][k][1]};
            Mma<Element>(tokens, rows[m][k][0], rows[m][k][1], sums[m][n].sums);
          } else {
            Mma<Element>(rows[m][k], key[0][k][0], key[0][k][1], sums[m][2 * n].sums);
            Mma<Element>(rows[m][k], key[1][k][0], key[1][k][1], sums[m][2 * n + 1].sums);
          }
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

// scores = Q K^T, of the warp's rows and the tile's tokens. With kCodes, ScaleScores is to follow.
template <class C>
__device__ __forceinline__ void ComputeScores(QueryOperands<C>* query, uint32_t keys,
                                              const ThreadPosition<C>& thread,
                                              float (&scores)[C::kRowTiles][C::kScoreTiles][4]) {
  if constexpr (C::kQueryParts > 0) {
    MultiplyCodes<C>(query, keys, thread, scores);
  } else {
    MultiplyElements<C>(query, keys, thread, scores);
  }
}

// rounded_sum += P * ones.
template <class C>
__device__ __forceinline__ void AddOnes(const Probabilities<C>& probabilities, State<C>* state) {
  using Element = typename C::Element;
  constexpr uint32_t kOnes = ElementTraits<Element>::kOnes;
#pragma unroll
  for (int n = 0; n < C::kTileTokens / 16; ++n) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      Mma<Element>(probabilities.rows[m][n], kOnes, kOnes, state->rounded_sum[m]);
    }
  }
}

// Subtracts from the output what is in it for the bases of its sums.
template <class C>
__device__ __forceinline__ void SubtractBases(State<C>* state) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int n = 0; n < C::kOutputTiles; ++n) {
        state->output[m][n].sums[2 * i] -= state->bases[m][i];
        state->output[m][n].sums[2 * i + 1] -= state->bases[m][i];
      }
      state->bases[m][i] = 0;
    }
  }
}

// output += P V of codes.
template <class C>
__device__ __forceinline__ void AddCodeValues(const Probabilities<C>& probabilities,
                                              uint32_t values, int lane, State<C>* state) {
  values = ValueAddress<C>(values, lane);
  FirstSums<C::kFloatValueSums> first;
  if constexpr (C::kFloatValueSums) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& bases = state->bases[m][i];
        bases = fmaf(probabilities.factors[m][i], kIntegerBase, bases);
      }
    }
  }
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) {
    const uint32_t address = StepAddress<C::kKvRowBytes>(values, step);
    uint32_t value[C::kTileTokens / 32][2][4];
    constexpr int kTiles = 4 / C::kRowTiles;  // sums at a time, for each row tile
#pragma unroll
    for (int begin = 0; begin < 4; begin += kTiles) {
      int32_t sums[C::kRowTiles][kTiles][4];
#pragma unroll
      for (int n = 0; n < C::kTileTokens / 32; ++n) {
        if (begin == 0) {
          LoadCodeValues(RowAddress<C::kKvRowBytes>(address, 2 * n), value[n][0]);
          LoadCodeValues(RowAddress<C::kKvRowBytes>(address, 2 * n + 1), value[n][1]);
        }
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
          for (int k = 0; k < kTiles; ++k) {
            MmaCodes<uint8_t>(probabilities.rows[m][n], value[n][0][begin + k],
                              value[n][1][begin + k], n == 0 ? first.sums : sums[m][k], sums[m][k]);
          }
        }
      }
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (int k = 0; k < kTiles; ++k) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int32_t sum = sums[m][k][c];
            float& output = state->output[m][4 * step + begin + k].sums[c];
            output = fmaf(C::kFloatValueSums ? __int_as_float(sum) : static_cast<float>(sum),
                          probabilities.factors[m][c / 2], output);
          }
        }
      }
    }
  }
}

// output += P V, and rounded_sum += P * ones. The order decides whether ptxas has enough registers:
// by columns of V and not by tokens, which would read more of V ahead, and the ones first. Each sum
// takes the tokens in their order in any case.
template <class C>
__device__ __forceinline__ void AddValues(const Probabilities<C>& probabilities, uint32_t values,
                                          int lane, State<C>* state) {
  using Element = typename C::ValueElement;
  if constexpr (C::kCodeValues) {
    AddCodeValues<C>(probabilities, values, lane, state);
    return;
  }
  values = ValueAddress<C>(values, lane);
  if constexpr (!C::kCodes) AddOnes<C>(probabilities, state);
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) {
#pragma unroll
    for (int n = 0; n < C::kTileTokens / 16; ++n) {
      constexpr int kTiles = 2 * C::kStepMmas;
      uint32_t value[kTiles][2];
      LoadValues<C>(RowAddress<C::kKvRowBytes>(StepAddress<C::kKvRowBytes>(values, step), n),
                    value);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        const auto& rows = probabilities.rows[m][n];
        if constexpr (C::kTransposed) {
#pragma unroll
          for (int k = 0; k < kTiles; k += 2) {
            const uint32_t columns[4] = {value[k][0], value[k + 1][0], value[k][1],
                                         value[k + 1][1]};
            Mma<Element>(columns, rows[0], rows[1], state->output[m][(kTiles * step + k) / 2].sums);
          }
        } else {
#pragma unroll
          for (int k = 0; k < kTiles; ++k) {
            Mma<Element>(rows, value[k][0], value[k][1], state->output[m][kTiles * step + k].sums);
          }
        }
      }
    }
  }
}

// To follow the tile at kv_row. The bases are 6 to 200 times larger than the sums, and take so many
// bits of the output: it is rid of them after every fourth tile of a sequence, which costs a
// quarter of what a conversion of each sum would. Bits depend on no tiling.
template <class C>
__device__ __forceinline__ void EndTile(int32_t kv_row, State<C>* state) {
  if constexpr (C::kFloatValueSums) {
    if (kv_row / C::kTileTokens % 4 == 3) SubtractBases<C>(state);
  }
}

// The state of a split after its last tile.
template <class C>
__device__ __forceinline__ void FinishState(State<C>* state) {
  if constexpr (C::kFloatValueSums) SubtractBases<C>(state);
  FinishSoftmax<C>(state);
  if constexpr (C::kCodes && !C::kTransposed) FinishCodes<C>(state);
}

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
    if constexpr (C::kCodes) {
      SyncWarpGroup<C>();
      ScaleScores<C>(factors, scores);
    }
    MaskScores<C>(mask, kv->KvRow(step), scores);
    float largest[C::kRowTiles][2];
    UpdateRowMax<C>(scale, scores, state, largest);
    ComputeProbabilities<C>(scale, scores, largest, factors, state, &probabilities);
  }
}

// `sums`: receives all streams but the last; null without kAddsStreams.
template <class C>
__device__ __forceinline__ void SingleBufferMainloop(const SoftmaxScale& scale, const Work& work,
                                                     const Partials& partials,
                                                     const TileMask<C>& mask, KvBuffers<C>* kv,
                                                     QueryOperands<C>* query, State<C>* state,
                                                     StreamSums<C>* sums) {
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
      MaskScores<C>(mask, row, scores);
    }
    kv->AwaitValue();
    const RowFactors<C> factors(thread);
    if constexpr (C::kCodes) {
      ScaleScores<C>(factors, scores);
      MaskScores<C>(mask, row, scores);  // -infinity times a scale of 0 would be NaN
    }
    float largest[C::kRowTiles][2];
    UpdateRowMax<C>(scale, scores, state, largest);
    Probabilities<C> probabilities;
    ComputeProbabilities<C>(scale, scores, largest, factors, state, &probabilities);
    AddValues<C>(probabilities, kv->Value(), lane, state);
    kv->LeaveValue();
    EndTile<C>(row, state);
    if constexpr (C::kStashes || C::kAddsStreams) {
      if (kv->EndsStream(row, next)) {
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
    MaskScores<C>(mask, kv->KvRow(step - 1), scores);
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

// Computes the outcome of this warp's rows: the sum of its group's streams, or else the state for
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
  } else if (work.span.softmax_scale < 0) {
    NegateQuery<C>(memory + C::kQueryOffset);
  }
  QueryOperands<C> query(shared + C::kQueryOffset, thread);
  if constexpr (C::kQueryInStages) __syncthreads();

  if constexpr (C::kAddsStreams) {
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
  if constexpr (!C::kAddsStreams) FinishState<C>(outcome);
  __syncthreads();
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_MAINLOOP_CUH_
