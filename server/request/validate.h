// The one place where a request's shape is checked, once. Checks that depend on the length of a
// sequence are made where that is known: the work of a request with resident K/V by
// SequenceStore::Lease, and again when earlier appends to its sequences have landed
// (kv/launch_builder.h).
#ifndef FLASHCORE_SERVER_REQUEST_VALIDATE_H_
#define FLASHCORE_SERVER_REQUEST_VALIDATE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/request/request.h"

namespace flashcore::server {

inline constexpr size_t kMaxRequestIdBytes = 64;

struct RequestLimits {
  uint32_t max_spans = 0;
  uint32_t max_heads = 0;
  std::vector<kernels::DType> dtypes;  // the device has kernels for these
  std::vector<uint32_t> head_dims;     // the device has kernels for these, with each dtype
  double max_flop = 0;                 // floating-point operations of one request, without masks
};

// INVALID_ARGUMENT if `dtype` is not in `supported`.
absl::Status ValidateDType(kernels::DType dtype, const std::vector<kernels::DType>& supported);

// After OK, `request` is consistent and within `limits`: no size computed from it overflows, and
// every tensor has exactly the bytes of its shape. Otherwise INVALID_ARGUMENT, with a message that
// names the field, its value, and what is allowed. Does not check the sequences, nor the work if
// there are any: SequenceStore does. Allocates nothing but the message.
absl::Status ValidateAttend(const AttendRequest& request, const RequestLimits& limits);

// INVALID_ARGUMENT if the request's work exceeds `max_flop`. `sequence_lengths`: rows in the
// sequence of each span before the request appends, [spans]; empty if all K/V is inline.
absl::Status ValidateWork(const AttendRequest& request,
                          const std::vector<uint64_t>& sequence_lengths, double max_flop);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_VALIDATE_H_
