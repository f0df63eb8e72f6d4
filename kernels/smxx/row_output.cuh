// How a finished packed row leaves the device: what the attention kernels' epilogues and the
// combine have in common.
#ifndef FLASHCORE_KERNELS_SMXX_ROW_OUTPUT_CUH_
#define FLASHCORE_KERNELS_SMXX_ROW_OUTPUT_CUH_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/smxx/work_list.h"

namespace flashcore::kernels {

// 2^x to 2 units in the last place; 0 below 2^-126, NaN for NaN.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What exponents are taken relative to, given the largest; anything will do if that is -infinity.
__device__ __forceinline__ float FiniteOr0(float max) { return max == -INFINITY ? 0 : max; }

// Natural logarithm of a row's sum of exponentials: sum * 2^max. -infinity if the row saw nothing.
__device__ __forceinline__ float LogSumExp(float max, float sum) {
  constexpr float kLn2 = 0.693147180559945309417f;
  return sum == 0 ? -INFINITY : (max + __log2f(sum)) * kLn2;
}

// What a row's output is divided by its sum with; 0 if the row saw nothing.
__device__ __forceinline__ float InverseOfSum(float sum) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sum));
  return sum == 0 ? 0 : inverse;
}

// A packed row of a block's output.
struct OutputRow {
  __device__ __forceinline__ OutputRow(RowDivider group, int kv_head, int32_t packed_row)
      : row(group.Divide(packed_row)),
        head(kv_head * group.divisor + packed_row - row * group.divisor) {}

  __device__ __forceinline__ std::byte* Output(const WorkTile& work) const {
    return work.output + row * work.row_stride + head * work.head_stride;
  }
  // Not to be asked for if the span wants no LSE.
  __device__ __forceinline__ float* Lse(const WorkTile& work) const {
    return work.lse + row * work.lse_row_stride + head * work.lse_head_stride;
  }

  int32_t row;
  int32_t head;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SMXX_ROW_OUTPUT_CUH_
