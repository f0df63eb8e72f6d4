// Spans over the tensors of a benchmark in device memory.
#ifndef FLASHCORE_KERNELS_BENCH_DEVICE_SPANS_H_
#define FLASHCORE_KERNELS_BENCH_DEVICE_SPANS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attention.h"
#include "kernels/bench/shape.h"

namespace flashcore::kernels {

// Device pointers, 16-byte aligned. Q and O are [spans, heads, query_rows, head_dim], contiguous;
// so are dense K and V, [spans, kv_heads, kv_rows, head_dim]. Paged K/V is [pages][K,
// V][kv_heads][64] [head_dim] from `key` on.
struct DeviceTensors {
  const std::byte* query = nullptr;
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;  // null if K/V is paged
  const int32_t* pages = nullptr;    // [spans, pages of a span]; null if K/V is dense
  // [kv_heads], of K and of V, in every span; of FP8 K/V only.
  const float* kv_scales = nullptr;
  std::byte* output = nullptr;
};

// The spans of `shape` over `tensors`, whose softmax_scale is 1 / sqrt(head_dim). LSE is not
// wanted.
std::vector<Span> MakeSpans(const AttentionShape& shape, const DeviceTensors& tensors);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_BENCH_DEVICE_SPANS_H_
