// S = Q K^T of a K/V tile, and what follows for each score.
#ifndef FLASHCORE_KERNELS_SM80_SCORES_CUH_
#define FLASHCORE_KERNELS_SM80_SCORES_CUH_

#include <cstdint>

#include "kernels/half.h"
#include "kernels/sm80/accumulators.cuh"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/mask.cuh"
#include "kernels/sm80/operands.cuh"
#include "kernels/sm80/ptx.cuh"
#include "kernels/sm80/score_scale.cuh"
#include "kernels/sm80/thread.cuh"

namespace flashcore::kernels::sm80 {

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

// scores = Q K^T, of the warp's rows and the tile's tokens. TransformScores is to follow.
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

// Transforms the scores of the tile at kv_row after Q K^T, element by element: a scale, with
// kCodes, and then the mask: -infinity times a scale of 0 would be NaN. With kCodes, a barrier of
// the warp group comes before, which `factors` were written ahead of.
template <class C>
__device__ __forceinline__ void TransformScores(const RowFactors<C>& factors,
                                                const TileMask<C>& mask, int32_t kv_row,
                                                float (&scores)[C::kRowTiles][C::kScoreTiles][4]) {
  if constexpr (C::kCodes) ScaleScores<C>(factors, scores);
  MaskScores<C>(mask, kv_row, scores);
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_SCORES_CUH_
