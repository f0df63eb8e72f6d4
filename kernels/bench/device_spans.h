// Spans over the tensors of a benchmark in device memory.
#ifndef FLASHCORE_KERNELS_BENCH_DEVICE_SPANS_H_
#define FLASHCORE_KERNELS_BENCH_DEVICE_SPANS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attention.h"
#include "kernels/bench/shape.h"

namespace flashcore::kernels {

// Device pointers, 16-byte aligned. Q and O are [spans, heads, query_rows, head_dim], contiguous.
struct DeviceTensors {
  const std::byte* query = nullptr;
  const std::byte* key = nullptr;    // dense: [spans, kv_heads, kv_rows, head_dim]; or all pages,
  const std::byte* value = nullptr;  // [pages][K, V][kv_heads][64][head_dim], and null
  std::byte* output = nullptr;
  const int32_t* pages = nullptr;  // [spans, pages of a span], or null for dense K/V
};

// The spans of `shape` over `tensors`, whose softmax_scale is 1 / sqrt(head_dim). LSE is not
// wanted.
std::vector<Span> MakeSpans(const AttentionShape& shape, const DeviceTensors& tensors);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_BENCH_DEVICE_SPANS_H_
