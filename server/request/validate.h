// The one place where a client's claims are checked. What has passed is not checked again.
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
  std::vector<kernels::DType> dtypes;  // those that the device has kernels for
  std::vector<uint32_t> head_dims;     // likewise
  double max_flop = 0;  // floating-point operations of one request, masks not counted
};

// Whether `dtype` is one of `supported`. INVALID_ARGUMENT.
absl::Status ValidateDType(kernels::DType dtype, const std::vector<kernels::DType>& supported);

// OK if `request` is consistent with itself and within `limits`; then no size computed from it
// overflows and every tensor has exactly the bytes that its shape needs. Otherwise
// INVALID_ARGUMENT, with a message that names the field, what came, and what is allowed. Whether
// the sequences that it names exist and fit is the SequenceStore's to say. Allocates nothing but
// the message.
absl::Status ValidateAttend(const AttendRequest& request, const RequestLimits& limits);

// Whether the request's work is within limits.max_flop. `sequence_lengths` has the rows that are in
// the sequence of each span, [spans]; empty if all K/V is inline. INVALID_ARGUMENT.
absl::Status ValidateWork(const AttendRequest& request,
                          const std::vector<uint64_t>& sequence_lengths,
                          const RequestLimits& limits);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_VALIDATE_H_
