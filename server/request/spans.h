// Turns the spans of a request into those of a kernel.
#ifndef FLASHCORE_SERVER_REQUEST_SPANS_H_
#define FLASHCORE_SERVER_REQUEST_SPANS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "server/request/request.h"
#include "server/request/tensors.h"

namespace flashcore::server {

// Distance from one row, and from one head, to the next.
struct Strides {
  int64_t row = 0;
  int64_t head = 0;
};

// The tensors of one span of a request, in the request's layout.
struct SpanTensors {
  const std::byte* query = nullptr;
  std::byte* output = nullptr;
  Strides query_strides;  // of query and output, in bytes
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  Strides kv_strides;  // in bytes
  float* lse = nullptr;
  Strides lse_strides;  // in elements
};

// Iterates over the spans of a validated request and their tensors. The request outlives it.
class SpanCursor {
 public:
  SpanCursor(const AttendRequest& request, const TensorAddresses& tensors);

  // The current span's. Do not call it beyond the last span.
  const SpanTensors& tensors() const { return current_; }
  void Advance();

 private:
  void SetStrides();

  const AttendRequest& request_;
  const int64_t head_bytes_;  // of one row of one head
  size_t span_ = 0;
  SpanTensors current_;
};

// The kernel's form of a span with inline K/V.
kernels::Span InlineSpan(const AttendRequest& request, const SpanShape& shape,
                         const SpanTensors& tensors);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_SPANS_H_
