#include "kernels/bench/device_spans.h"

#include <cmath>

namespace flashcore::kernels {
namespace {

// K/V of span s, dense as [kv_heads, kv_rows, head_dim].
KvView DenseKv(const AttentionShape& shape, const DeviceTensors& tensors, int32_t s) {
  KvView kv;
  kv.row_stride = shape.head_dim * shape.geometry().kv_element_bytes();
  kv.head_stride = shape.kv_rows * kv.row_stride;
  kv.page_stride = kPageTokens * kv.row_stride;
  kv.rows = shape.kv_rows;
  kv.key = tensors.key + s * shape.num_kv_heads * kv.head_stride;
  kv.value = tensors.value + s * shape.num_kv_heads * kv.head_stride;
  return kv;
}

KvView PagedKv(const AttentionShape& shape, const DeviceTensors& tensors, int32_t s) {
  KvView kv;
  kv.row_stride = shape.head_dim * shape.geometry().kv_element_bytes();
  kv.head_stride = kPageTokens * kv.row_stride;
  kv.page_stride = 2 * shape.num_kv_heads * kv.head_stride;
  kv.rows = shape.kv_rows;
  kv.key = tensors.key;
  kv.value = tensors.key + shape.num_kv_heads * kv.head_stride;
  kv.pages = tensors.pages + int64_t{s} * PagesFor(shape.kv_rows);
  return kv;
}

}  // namespace

std::vector<Span> MakeSpans(const AttentionShape& shape, const DeviceTensors& tensors) {
  std::vector<Span> spans(shape.spans);
  for (int32_t s = 0; s < shape.spans; ++s) {
    Span& span = spans[s];
    span.row_stride = shape.head_dim * DTypeBytes(shape.dtype);
    span.head_stride = shape.query_rows * span.row_stride;
    span.query = tensors.query + s * shape.num_heads * span.head_stride;
    span.output = tensors.output + s * shape.num_heads * span.head_stride;
    span.query_rows = shape.query_rows;
    span.kv = tensors.pages != nullptr ? PagedKv(shape, tensors, s) : DenseKv(shape, tensors, s);
    span.kv.key_scale = tensors.kv_scales;
    span.kv.value_scale = tensors.kv_scales;
    span.mask = shape.mask;
    span.softmax_scale = 1 / std::sqrt(static_cast<float>(shape.head_dim));
  }
  return spans;
}

}  // namespace flashcore::kernels
