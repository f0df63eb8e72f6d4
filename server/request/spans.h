// From requests to what a kernel takes.
#ifndef FLASHCORE_SERVER_REQUEST_SPANS_H_
#define FLASHCORE_SERVER_REQUEST_SPANS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "server/request/request.h"

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
  Strides query_strides;  // bytes; O's too
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  Strides kv_strides;  // bytes
  float* lse = nullptr;
  Strides lse_strides;  // elements
};

// Walks the packed tensors of a validated request span by span. The request outlives it.
class SpanCursor {
 public:
  SpanCursor(const AttendRequest& request, const TensorAddresses& tensors);

  // Of the current span. Not beyond the last.
  const SpanTensors& tensors() const { return current_; }
  void Advance();

 private:
  void SetStrides();

  const AttendRequest& request_;
  size_t span_ = 0;
  SpanTensors current_;
};

// A span with inline K/V as a kernel takes it.
kernels::Span InlineSpan(const AttendRequest& request, const SpanShape& shape,
                         const SpanTensors& tensors);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_SPANS_H_
