#include "server/request/spans.h"

namespace flashcore::server {
namespace {

// Of a [rows, heads, size] or [heads, rows, size] tensor; `size` and the result in the same unit.
Strides StridesOf(Layout layout, int64_t rows, int64_t heads, int64_t size) {
  if (layout == Layout::kNhd) return {heads * size, size};
  return {size, rows * size};
}

kernels::KvView InlineKv(const SpanTensors& tensors, uint32_t rows) {
  kernels::KvView kv;
  kv.key = tensors.key;
  kv.value = tensors.value;
  kv.page_stride = kernels::kPageTokens * tensors.kv_strides.row;
  kv.head_stride = tensors.kv_strides.head;
  kv.row_stride = tensors.kv_strides.row;
  kv.rows = static_cast<int32_t>(rows);
  return kv;
}

}  // namespace

SpanCursor::SpanCursor(const AttendRequest& request, const TensorAddresses& tensors)
    : request_(request) {
  current_.query = tensors.query;
  current_.output = tensors.output;
  current_.key = tensors.key;
  current_.value = tensors.value;
  current_.lse = tensors.lse;
  SetStrides();
}

void SpanCursor::SetStrides() {
  const auto head_bytes =
      static_cast<int64_t>(request_.head_dim * kernels::DTypeBytes(request_.dtype));
  const SpanShape& shape = request_.spans[span_];
  current_.query_strides =
      StridesOf(request_.layout, shape.query_rows, request_.num_heads, head_bytes);
  current_.kv_strides =
      StridesOf(request_.layout, shape.kv_rows, request_.num_kv_heads, head_bytes);
  current_.lse_strides = StridesOf(request_.layout, shape.query_rows, request_.num_heads, 1);
}

void SpanCursor::Advance() {
  const auto head_bytes =
      static_cast<int64_t>(request_.head_dim * kernels::DTypeBytes(request_.dtype));
  const SpanShape& shape = request_.spans[span_];
  const int64_t query_bytes = int64_t{shape.query_rows} * request_.num_heads * head_bytes;
  const int64_t kv_bytes = int64_t{shape.kv_rows} * request_.num_kv_heads * head_bytes;
  current_.query += query_bytes;
  current_.output += query_bytes;
  current_.key += kv_bytes;
  current_.value += kv_bytes;
  if (current_.lse != nullptr) current_.lse += int64_t{shape.query_rows} * request_.num_heads;
  if (++span_ < request_.spans.size()) SetStrides();
}

kernels::Span InlineSpan(const AttendRequest& request, const SpanShape& shape,
                         const SpanTensors& tensors) {
  kernels::Span span;
  span.query = tensors.query;
  span.output = tensors.output;
  span.row_stride = tensors.query_strides.row;
  span.head_stride = tensors.query_strides.head;
  span.query_rows = static_cast<int32_t>(shape.query_rows);
  span.lse = tensors.lse;
  span.lse_row_stride = tensors.lse_strides.row;
  span.lse_head_stride = tensors.lse_strides.head;
  span.mask = request.mask;
  span.softmax_scale = request.softmax_scale;
  span.kv = InlineKv(tensors, shape.kv_rows);
  return span;
}

}  // namespace flashcore::server
