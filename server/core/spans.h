// From requests to what a kernel takes.
#ifndef FLASHCORE_SERVER_CORE_SPANS_H_
#define FLASHCORE_SERVER_CORE_SPANS_H_

#include <cstddef>
#include <vector>

#include "kernels/attention.h"
#include "server/core/request.h"

namespace flashcore::server {

// Where the tensors of one request are, in memory that the kernel can read and write.
struct TensorAddresses {
  const std::byte* query = nullptr;
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  std::byte* output = nullptr;
  float* lse = nullptr;  // null: not wanted
};

// Appends the spans of a validated request with inline K/V to `*spans`, in the request's layout.
void AppendSpans(const AttendRequest& request, const TensorAddresses& tensors,
                 std::vector<kernels::Span>* spans);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_CORE_SPANS_H_
