// The last steps of a packed row, for the epilogues and the combine: arithmetic and address.
#ifndef FLASHCORE_KERNELS_CUDA_ROW_OUTPUT_CUH_
#define FLASHCORE_KERNELS_CUDA_ROW_OUTPUT_CUH_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cuda/work_list.h"

namespace flashcore::kernels {

// 2^x to 2 units in the last place; 0 below 2^-126, NaN for NaN.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The base of a row's exponents: its max, or 0 for -infinity, which minus itself would be NaN.
__device__ __forceinline__ float FiniteOr0(float max) { return max == -INFINITY ? 0 : max; }

// log(sum * 2^max): the natural logarithm of a row's sum of exponentials. -infinity for sum 0, a
// row without visible tokens.
__device__ __forceinline__ float LogSumExp(float max, float sum) {
  constexpr float kLn2 = 0.693147180559945309417f;
  return sum == 0 ? -INFINITY : (max + __log2f(sum)) * kLn2;
}

// 1 / sum, the factor that normalises a row's output; 0 for sum 0.
__device__ __forceinline__ float InverseOfSum(float sum) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sum));
  return sum == 0 ? 0 : inverse;
}

// The weights of two parts of a row's attention in their sum: each is relative to 2^max of its own
// scores, the sum to that of both.
struct SumWeights {
  SumWeights() = default;
  __device__ __forceinline__ SumWeights(float first_max, float second_max)
      : max(fmaxf(first_max, second_max)),
        first(Exp2(first_max - FiniteOr0(max))),
        second(Exp2(second_max - FiniteOr0(max))) {}

  // Never -0, so that adding nothing changes no bits.
  __device__ __forceinline__ float Add(float first_part, float second_part) const {
    return fmaf(second, second_part, first * first_part) + 0.0f;
  }

  float max;
  float first;
  float second;
};

// Where packed row `packed_row` of a KV head is stored.
struct OutputRow {
  __device__ __forceinline__ OutputRow(RowDivider group, int kv_head, int32_t packed_row)
      : row(group.Divide(packed_row)),
        head(kv_head * group.divisor + packed_row - row * group.divisor) {}

  __device__ __forceinline__ std::byte* Output(const Work& work) const {
    return work.span.output + row * work.span.row_stride + head * work.span.head_stride;
  }
  // Only if work.span.lse is not null.
  __device__ __forceinline__ float* Lse(const Work& work) const {
    return work.span.lse + row * work.span.lse_row_stride + head * work.span.lse_head_stride;
  }

  int32_t row;
  int32_t head;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CUDA_ROW_OUTPUT_CUH_
