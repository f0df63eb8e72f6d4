// How a finished packed row leaves the device, and how rows of partial results are merged: what
// the attention kernels' epilogues and the combine have in common.
#ifndef FLASHCORE_KERNELS_SMXX_ROW_OUTPUT_CUH_
#define FLASHCORE_KERNELS_SMXX_ROW_OUTPUT_CUH_

#include <cmath>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/smxx/element.cuh"

namespace flashcore::kernels {

// Threads handle a row of O in chunks of 8 components: 16 bytes as elements, 32 as floats.
constexpr int kChunk = 8;

// 2^x to 2 units in the last place; 0 below 2^-126, NaN for NaN.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What partial results relative to 2^max are brought to. A row that has seen nothing keeps 0 in
// place of -infinity: 2^(-infinity - 0) = 0.
__device__ __forceinline__ float SoftmaxBase(float max) { return max == -INFINITY ? 0.0f : max; }

// One chunk of a packed row, unnormalised: O, and what the row's probabilities sum up to, both
// relative to 2^max.
struct RowChunk {
  float output[kChunk] = {};
  float max = -INFINITY;
  float sum = 0;

  // Adds a part that is relative to 2^part_max. `max` must be the largest of all parts by now.
  __device__ __forceinline__ void Add(const float* part_output, float part_max, float part_sum) {
    const float weight = Exp2(part_max - SoftmaxBase(max));
    const float4 low = reinterpret_cast<const float4*>(part_output)[0];
    const float4 high = reinterpret_cast<const float4*>(part_output)[1];
    const float part[kChunk] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int c = 0; c < kChunk; ++c) output[c] += weight * part[c];
    sum += weight * part_sum;
  }
};

// Writes chunk number `chunk` of a finished packed row to its span's O, and with chunk 0 the LSE.
template <class Element>
__device__ __forceinline__ void WriteChunk(const Span& span, int32_t group, int32_t kv_head,
                                           int32_t packed_row, int chunk, const RowChunk& from) {
  const int64_t head = int64_t{kv_head} * group + packed_row % group;
  const int64_t row = packed_row / group;
  const bool empty = from.sum == 0;  // the row sees nothing
  const float scale = 1.0f / from.sum;
  uint32_t pairs[kChunk / 2];
#pragma unroll
  for (int p = 0; p < kChunk / 2; ++p) {
    pairs[p] = empty ? 0
                     : ElementTraits<Element>::Pack(from.output[2 * p] * scale,
                                                    from.output[2 * p + 1] * scale);
  }
  std::byte* to = span.output + row * span.row_stride + head * span.head_stride;
  reinterpret_cast<uint4*>(to)[chunk] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  if (chunk == 0 && span.lse != nullptr) {
    constexpr float kLn2 = 0.693147180559945309417f;
    span.lse[row * span.lse_row_stride + head * span.lse_head_stride] =
        empty ? -INFINITY : from.max * kLn2 + logf(from.sum);
  }
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SMXX_ROW_OUTPUT_CUH_
