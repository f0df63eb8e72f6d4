#include "server/request/spans.h"

namespace flashcore::server {

SpanCursor::SpanCursor(const AttendRequest& request, const TensorAddresses& tensors)
    : request_(request),
      head_bytes_(static_cast<int64_t>(request.head_dim * kernels::DTypeBytes(request.dtype))) {
  current_.query = tensors.query;
  current_.output = tensors.output;
  current_.key = tensors.key;
  current_.value = tensors.value;
  current_.lse = tensors.lse;
  SetStrides();
}

void SpanCursor::SetStrides() {
  const SpanShape& shape = request_.spans[span_];
  // Strides of a [rows, heads, size] or [heads, rows, size] tensor, in the unit of `size`.
  const auto strides = [&](uint32_t rows, uint32_t heads, int64_t size) {
    return request_.layout == Layout::kNhd ? Strides{heads * size, size}
                                           : Strides{size, rows * size};
  };
  current_.query_strides = strides(shape.query_rows, request_.num_heads, head_bytes_);
  current_.kv_strides = strides(shape.kv_rows, request_.num_kv_heads, head_bytes_);
  current_.lse_strides = strides(shape.query_rows, request_.num_heads, 1);
}

void SpanCursor::Advance() {
  const SpanShape& shape = request_.spans[span_];
  const int64_t query_vectors = int64_t{shape.query_rows} * request_.num_heads;
  const int64_t kv_vectors = int64_t{shape.kv_rows} * request_.num_kv_heads;
  current_.query += query_vectors * head_bytes_;
  current_.output += query_vectors * head_bytes_;
  current_.key += kv_vectors * head_bytes_;
  current_.value += kv_vectors * head_bytes_;
  if (current_.lse != nullptr) current_.lse += query_vectors;
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
  span.terms = request.terms;
  span.kv.key = tensors.key;
  span.kv.value = tensors.value;
  span.kv.page_stride = kernels::kPageTokens * tensors.kv_strides.row;
  span.kv.head_stride = tensors.kv_strides.head;
  span.kv.row_stride = tensors.kv_strides.row;
  span.kv.rows = static_cast<int32_t>(shape.kv_rows);
  return span;
}

}  // namespace flashcore::server
