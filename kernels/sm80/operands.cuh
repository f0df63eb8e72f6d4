// Operands of MultiplyAdd from tiles in shared memory, in steps of 32 bytes of a row of K or V. The
// address functions give that of step 0, in a tile at `tile`; StepAddress goes on from there.
//
// 16-bit elements are operands as ldmatrix loads them, 16 components a step. E4M3 codes become
// float16 in registers, 32 components a step, two operands. A lane gets them in fours, which
// settles what it has of an operand of 16 components, with t = lane % 4:
//   of K, the components 4t to 4t + 3, where it would have 2t, 2t + 1, 2t + 8 and 2t + 9. The order
//     does not matter to a sum, as long as Q's is the same.
//   of V, even and odd columns in different tiles, so that tiles 2n and 2n + 1 of the output have
//     columns 16n + 4t and 16n + 4t + 2, and those after them. FinishOutput sorts them.
#ifndef FLASHCORE_KERNELS_SM80_OPERANDS_CUH_
#define FLASHCORE_KERNELS_SM80_OPERANDS_CUH_

#include <cstdint>

#include "kernels/sm80/config.cuh"
#include "kernels/sm80/ptx.cuh"
#include "kernels/sm80/shared_tile.cuh"
#include "kernels/smxx/e4m3.cuh"
#include "kernels/smxx/work_list.h"

namespace flashcore::kernels::sm80 {

template <class C>
inline constexpr bool kIsFp8 = C::kStepOperands == 2;

// Q rows [row, row + 16), whose steps are of 16 components.
template <class C>
__device__ __forceinline__ uint32_t QueryAddress(uint32_t tile, int row, int lane) {
  if constexpr (kIsFp8<C>) {
    return tile + ChunkOffset<C::kHeadDim>(row + lane / 4, 0, lane % 4 / 2) + lane % 2 * 8;
  } else {
    return tile + ChunkOffset<C::kHeadDim>(row + lane % 16, 0, lane / 16);
  }
}

template <class C>
__device__ __forceinline__ void LoadQuery(uint32_t address, uint32_t (&query)[4]) {
  if constexpr (kIsFp8<C>) {
    Load8(address, query[0], query[2]);
    Load8(address + 8 * C::kHeadDim * 2, query[1], query[3]);
  } else {
    LoadMatrices(address, query);
  }
}

// K of 16 tokens.
template <class C>
__device__ __forceinline__ uint32_t KeyAddress(uint32_t tile, int lane) {
  return tile + ChunkOffset<C::kKvWidth>(lane / 16 * 8 + lane % 8, 0, lane / 8 % 2);
}

// keys[n]: the operands of 8 tokens.
template <class C>
__device__ __forceinline__ void LoadKeys(uint32_t address,
                                         uint32_t (&keys)[2][C::kStepOperands][2]) {
  uint32_t matrices[4];
  LoadMatrices(address, matrices);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if constexpr (kIsFp8<C>) {
      E4M3ToFloat16(matrices[n], keys[n / 2][n % 2]);
    } else {
      keys[n / 2][0][n % 2] = matrices[n];
    }
  }
}

// V of 16 tokens, transposed.
template <class C>
__device__ __forceinline__ uint32_t ValueAddress(uint32_t tile, int lane) {
  return tile + ChunkOffset<C::kKvWidth>(lane % 16, 0, lane / 16);
}

// values[n]: the operand of 8 columns.
template <class C>
__device__ __forceinline__ void LoadValues(uint32_t address,
                                           uint32_t (&values)[2 * C::kStepOperands][2]) {
  uint32_t matrices[4];
  LoadMatricesTransposed(address, matrices);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if constexpr (kIsFp8<C>) {
      // Two columns of one token, then of the next: first one column of both, then the other.
      uint32_t columns[2];
      E4M3ToFloat16(__byte_perm(matrices[n], 0, 0x3120), columns);
      values[n / 2 * 2][n % 2] = columns[0];
      values[n / 2 * 2 + 1][n % 2] = columns[1];
    } else {
      values[n / 2][n % 2] = matrices[n];
    }
  }
}

// What Q K^T is to be multiplied with.
template <class C>
__device__ __forceinline__ float ScoreScale(const WorkTile& work, int kv_head) {
  if constexpr (kIsFp8<C>) return work.softmax_scale * work.key_scale[kv_head];
  return work.softmax_scale;
}

// Turns an output of E4M3 codes into one of what they stand for, with columns in the order that
// Position::Column tells.
template <class C>
__device__ __forceinline__ void FinishOutput(const WorkTile& work, int kv_head, State<C>* state) {
  if constexpr (kIsFp8<C>) {
    const float scale = work.value_scale[kv_head];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < C::kOutputTiles; n += 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float(&even)[4] = state->output[m][n].sums;
          float(&odd)[4] = state->output[m][n + 1].sums;
          const float third = even[2 * i + 1] * scale;
          even[2 * i] *= scale;
          even[2 * i + 1] = odd[2 * i] * scale;
          odd[2 * i] = third;
          odd[2 * i + 1] *= scale;
        }
      }
    }
  }
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_OPERANDS_CUH_
