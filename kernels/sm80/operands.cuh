// Operands of Mma (ptx.cuh), read from tiles in shared memory in steps of 32 bytes per row. Each
// address function returns the lane's address for step 0; StepAddress and RowAddress lead on.
//
// Codes of 8 bits, E4M3 or INT8, become 16-bit elements in registers. A register holds four codes,
// so a lane holds other elements than with a 16-bit type. With t = lane % 4:
//
// Components of Q and K in one mma (a sum over components may take them in any order, as long as Q
// and K agree):
//
//   component       0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
//   16-bit  t       0  0  1  1  2  2  3  3  0  0  1  1  2  2  3  3
//           pair    0  0  0  0  0  0  0  0  1  1  1  1  1  1  1  1
//   codes   t       0  0  0  0  1  1  1  1  2  2  2  2  3  3  3  3
//           pair    0  0  1  1  0  0  1  1  0  0  1  1  0  0  1  1
//
// Columns of V, and so of O, in a pair of output tiles. c is the accumulator of row lane / 4; row
// lane / 4 + 8 has c + 2:
//
//   column          0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
//   16-bit  tile    0  0  0  0  0  0  0  0  1  1  1  1  1  1  1  1
//           t       0  0  1  1  2  2  3  3  0  0  1  1  2  2  3  3
//           c       0  1  0  1  0  1  0  1  0  1  0  1  0  1  0  1
//   codes   tile    0  1  0  1  0  1  0  1  0  1  0  1  0  1  0  1
//           t       0  0  0  0  1  1  1  1  2  2  2  2  3  3  3  3
//           c       0  0  1  1  0  0  1  1  0  0  1  1  0  0  1  1
//   codes after     0  0  1  1  0  0  1  1  0  0  1  1  0  0  1  1   tile
//   FinishCodes     0  1  0  1  0  1  0  1  0  1  0  1  0  1  0  1   c
//
// With kTransposed, K and V are A operands, and Q and P are B operands: the mma of 16 tokens, or of
// 16 columns, by 8 rows. K and V are read as above, and each sum takes the same numbers in the same
// order. Accumulators of columns 2 * g and 2 * g + 1 of an output tile, with g = lane / 4, are
// those of a lane, each for rows 2 * t and 2 * t + 1.
#ifndef FLASHCORE_KERNELS_SM80_OPERANDS_CUH_
#define FLASHCORE_KERNELS_SM80_OPERANDS_CUH_

#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/work_list.h"
#include "kernels/sm80/accumulators.cuh"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/ptx.cuh"
#include "kernels/sm80/score_scale.cuh"
#include "kernels/sm80/shared_tile.cuh"
#include "kernels/sm80/thread.cuh"

namespace flashcore::kernels::sm80 {

// Q of kMmaRows rows, from `row`. A step has 16 components, or 32 of a part.
template <class C>
__device__ __forceinline__ uint32_t QueryAddress(uint32_t tile, int row, int lane) {
  if constexpr (C::kCodes && C::kQueryParts == 0) {
    return tile + ChunkOffset<C::kQueryRowBytes>(row + lane / 4, 0, lane % 4 / 2) + lane % 2 * 8;
  } else if constexpr (C::kTransposed) {
    return tile + ChunkOffset<C::kQueryOperandBytes>(row + lane % 8, 0, lane / 8 % 2);
  } else {
    return tile + ChunkOffset<C::kQueryOperandBytes>(row + lane % 16, 0, lane / 16);
  }
}

// The operand of an mma: A, or with kTransposed B.
template <class C>
using QueryOperand = uint32_t[C::kTransposed ? 2 : 4];

template <class C>
__device__ __forceinline__ void LoadQuery(uint32_t address, QueryOperand<C>& query) {
  if constexpr (C::kCodes && C::kQueryParts == 0) {
    Load8(address, query[0], query[C::kTransposed ? 1 : 2]);
    if constexpr (!C::kTransposed) Load8(address + 8 * C::kQueryRowBytes, query[1], query[3]);
  } else {
    LoadMatrices(address, query);
  }
}

// K of 16 tokens.
template <class C>
__device__ __forceinline__ uint32_t KeyAddress(uint32_t tile, int lane) {
  return tile + ChunkOffset<C::kKvRowBytes>(lane / 16 * 8 + lane % 8, 0, lane / 8 % 2);
}

// keys[n][k]: the operand of mma k for tokens [8 * n, 8 * n + 8).
template <class C>
__device__ __forceinline__ void LoadKeys(uint32_t address, uint32_t (&keys)[2][C::kStepMmas][2]) {
  uint32_t matrices[4];
  LoadMatrices(address, matrices);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if constexpr (C::kCodes) {
      CodePairs<typename C::KvElement, typename C::Element>(matrices[n], /*alternate=*/false,
                                                            keys[n / 2][n % 2]);
    } else {
      keys[n / 2][0][n % 2] = matrices[n];
    }
  }
}

// V of 16 tokens, transposed.
template <class C>
__device__ __forceinline__ uint32_t ValueAddress(uint32_t tile, int lane) {
  return tile + ChunkOffset<C::kKvRowBytes>(lane % 16, 0, lane / 16);
}

// values[n]: the operand of the step's output tile n.
template <class C>
__device__ __forceinline__ void LoadValues(uint32_t address,
                                           uint32_t (&values)[2 * C::kStepMmas][2]) {
  uint32_t matrices[4];
  LoadMatricesTransposed(address, matrices);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if constexpr (C::kCodes) {
      // From (token, columns 2g and 2g + 1), (next token, the same columns) to the even column of
      // both tokens, then the odd one.
      uint32_t columns[2];
      CodePairs<typename C::KvElement, typename C::ValueElement>(matrices[n], /*alternate=*/true,
                                                                 columns);
      values[n / 2 * 2][n % 2] = columns[0];
      values[n / 2 * 2 + 1][n % 2] = columns[1];
    } else {
      values[n / 2][n % 2] = matrices[n];
    }
  }
}

// values[n]: the operand of the step's output tile n for P and V of codes, of 16 tokens. Lane % 4 =
// t has tokens 2t, 2t + 1, 2t + 8 and 2t + 9 of the four, as its four probabilities.
__device__ __forceinline__ void LoadCodeValues(uint32_t address, uint32_t (&values)[4]) {
  uint32_t matrices[4];
  LoadMatricesTransposed(address, matrices);
#pragma unroll
  for (int n = 0; n < 4; n += 2) {  // columns as LoadValues has them
    values[n] = __byte_perm(matrices[n], matrices[n + 1], 0x6420);
    values[n + 1] = __byte_perm(matrices[n], matrices[n + 1], 0x7531);
  }
}

// The factor of Q K^T. With codes, scores are exponents already (ScaleScores).
template <class C>
__device__ __forceinline__ SoftmaxScale ScoreScale(const Work& work) {
  if constexpr (C::kCodes) return SoftmaxScale::One();
  return SoftmaxScale(work.span.terms.softmax_scale);
}

// For codes of V: puts the columns of the output in the order of ThreadPosition::Column, which they
// have already with kTransposed.
template <class C>
__device__ __forceinline__ void FinishCodes(State<C>* state) {
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kOutputTiles; n += 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float(&even)[4] = state->output[m][n].sums;
        float(&odd)[4] = state->output[m][n + 1].sums;
        const float third = even[2 * i + 1];
        even[2 * i + 1] = odd[2 * i];
        odd[2 * i] = third;
      }
    }
  }
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_OPERANDS_CUH_
