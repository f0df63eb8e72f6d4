// Q as INT8 codes, for Q K^T with K's codes as they are.
#ifndef FLASHCORE_KERNELS_SM80_QUERY_CODES_CUH_
#define FLASHCORE_KERNELS_SM80_QUERY_CODES_CUH_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/work_list.h"
#include "kernels/half.h"
#include "kernels/sm80/ptx.cuh"
#include "kernels/sm80/score_scale.cuh"
#include "kernels/sm80/shared_tile.cuh"

namespace flashcore::kernels::sm80 {

// Replaces the rows of the Q tile in shared memory by codes, the bytes of a row's higher (or only)
// halves and then those of its lower halves, and writes each row's factor, which makes a score of a
// sum of products of codes, and an exponent of 2 but for the scale of K's row. An element x of a
// row whose largest magnitude is m becomes the integer nearest to x * 32512 / m = 256 * higher +
// lower, or with one part to x * 127 / m. Rows with m below 2^-110 have fewer bits. A row with NaN
// or infinity has factor NaN. With kFloatScoreSums a factor has 22 bits, so that kIntegerBase times
// it is exact.
template <class C>
__device__ __forceinline__ void QuantiseQuery(const Work& work, std::byte* tile, float* factors) {
  using Traits = ElementTraits<typename C::Element>;
  constexpr int kChunks = C::kQueryRowBytes / 16;  // of a row, a lane for each
  // Threads that take part.
  constexpr int kThreads = C::kThreads < C::kRows * kChunks ? C::kThreads : C::kRows * kChunks;
  constexpr int kTurns = C::kRows * kChunks / kThreads;  // chunks of a lane
  constexpr int kBatch = kTurns < 4 ? kTurns : 4;        // at a time, which hides latencies
  constexpr float kLargest = C::kQueryParts == 2 ? 127 * 256 : 127;
  constexpr float kLeast = 0x1p-110f;  // whose inverse is a float
  static_assert(32 % kChunks == 0 && kTurns * kThreads == C::kRows * kChunks &&
                kTurns % kBatch == 0 && kThreads % 32 == 0);
  const int chunk = threadIdx.x % kChunks;
#pragma unroll 1
  for (int turn = 0; turn < kTurns; turn += kBatch) {
    if (kThreads < C::kThreads && threadIdx.x >= kThreads) break;
    const int first_row = (turn * kThreads + static_cast<int>(threadIdx.x)) / kChunks;
    const auto row_at = [&](int n) { return first_row + n * (kThreads / kChunks); };
    uint32_t pairs[kBatch][4];
    uint32_t largest[kBatch];  // without the sign: as integers bits are in the order of magnitudes
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const uint4 elements = *reinterpret_cast<const uint4*>(
          tile + StepOffset<C::kQueryRowBytes>(row_at(n), chunk / 2, chunk % 2));
      pairs[n][0] = elements.x, pairs[n][1] = elements.y;
      pairs[n][2] = elements.z, pairs[n][3] = elements.w;
      largest[n] = 0;
#pragma unroll
      for (const uint32_t pair : pairs[n]) {
        largest[n] = max(largest[n], max(pair & 0x7fffu, pair >> 16 & 0x7fffu));
      }
    }
#pragma unroll
    for (int lanes = kChunks / 2; lanes > 0; lanes /= 2) {
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        largest[n] = max(largest[n], __shfl_xor_sync(0xffffffffu, largest[n], lanes));
      }
    }
    // All lanes of the rows have read them: each took part in the shuffles. With kPacksQuery codes
    // go where rows above were, which others read.
    if constexpr (C::kPacksQuery) __syncthreads();
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const float magnitude = fmaxf(Traits::Unpack(largest[n], 0), kLeast);  // kLeast for NaN
      const float inverse = copysignf(kLargest / magnitude, work.span.terms.softmax_scale);
      uint32_t numbers[8];  // kIntegerBase + number
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float element = Traits::Unpack(pairs[n][i / 2], i % 2);
        numbers[i] = __float_as_uint(__fadd_rn(__fmul_rn(element, inverse), kIntegerBase));
      }
      // Byte `byte` of each.
      const auto write = [&](int part, int byte) {
        const auto four = [&](const uint32_t* of) {
          const uint32_t select = byte == 0 ? 0x0040 : 0x0051;
          return __byte_perm(__byte_perm(of[0], of[1], select), __byte_perm(of[2], of[3], select),
                             0x5410);
        };
        const int to = (part * kChunks + chunk) / 2;
        std::byte* const codes =
            tile + StepOffset<C::kQueryOperandBytes>(row_at(n), to / 2, to % 2);
        *reinterpret_cast<uint2*>(codes + chunk % 2 * 8) =
            make_uint2(four(numbers), four(numbers + 4));
      };
      write(C::kQueryParts - 1, 0);
      if constexpr (C::kQueryParts == 2) {
#pragma unroll
        for (uint32_t& number : numbers) number += 128;  // the lower halves have a sign
        write(0, 1);
      }
      if (chunk == 0) {
        const bool finite = largest[n] < Traits::kInfinity;
        float factor = magnitude * (1 / kLargest) * (fabsf(work.span.terms.softmax_scale) * kLog2E);
        if constexpr (C::kFloatScoreSums) factor = __uint_as_float(__float_as_uint(factor) & ~3u);
        factors[row_at(n)] = finite ? factor : NAN;
      }
    }
  }
  __syncthreads();
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_QUERY_CODES_CUH_
