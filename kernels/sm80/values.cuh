// O += P V of a K/V tile.
#ifndef FLASHCORE_KERNELS_SM80_VALUES_CUH_
#define FLASHCORE_KERNELS_SM80_VALUES_CUH_

#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/half.h"
#include "kernels/sm80/accumulators.cuh"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/operands.cuh"
#include "kernels/sm80/ptx.cuh"
#include "kernels/sm80/softmax.cuh"

namespace flashcore::kernels::sm80 {

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

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_VALUES_CUH_
