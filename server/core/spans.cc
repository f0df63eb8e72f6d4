#include "server/core/spans.h"

#include <cstdint>

namespace flashcore::server {
namespace {

// Distance from one row, and from one head, to the next.
struct Strides {
  int64_t row = 0;
  int64_t head = 0;
};

// Of a [rows, heads, size] or [heads, rows, size] tensor; `size` and the result in the same unit.
Strides StridesOf(Layout layout, int64_t rows, int64_t heads, int64_t size) {
  if (layout == Layout::kNhd) return {heads * size, size};
  return {size, rows * size};
}

}  // namespace

void AppendSpans(const AttendRequest& request, const TensorAddresses& tensors,
                 std::vector<kernels::Span>* spans) {
  const int64_t head_bytes =
      static_cast<int64_t>(request.head_dim * kernels::DTypeBytes(request.dtype));
  TensorAddresses next = tensors;
  for (const SpanShape& shape : request.spans) {
    const Strides q = StridesOf(request.layout, shape.query_rows, request.num_heads, head_bytes);
    const Strides kv = StridesOf(request.layout, shape.kv_rows, request.num_kv_heads, head_bytes);
    kernels::Span& span = spans->emplace_back();
    span.query = next.query;
    span.output = next.output;
    span.row_stride = q.row;
    span.head_stride = q.head;
    span.query_rows = static_cast<int32_t>(shape.query_rows);
    span.mask = request.mask;
    span.softmax_scale = request.softmax_scale;
    span.kv.key = next.key;
    span.kv.value = next.value;
    span.kv.page_stride = kernels::kPageTokens * kv.row;
    span.kv.head_stride = kv.head;
    span.kv.row_stride = kv.row;
    span.kv.rows = static_cast<int32_t>(shape.kv_rows);

    const int64_t query_bytes = int64_t{shape.query_rows} * request.num_heads * head_bytes;
    const int64_t kv_bytes = int64_t{shape.kv_rows} * request.num_kv_heads * head_bytes;
    next.query += query_bytes;
    next.output += query_bytes;
    next.key += kv_bytes;
    next.value += kv_bytes;
    if (next.lse != nullptr) {
      const Strides lse = StridesOf(request.layout, shape.query_rows, request.num_heads, 1);
      span.lse = next.lse;
      span.lse_row_stride = lse.row;
      span.lse_head_stride = lse.head;
      next.lse += int64_t{shape.query_rows} * request.num_heads;
    }
  }
}

}  // namespace flashcore::server
