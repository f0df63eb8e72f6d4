// Converts requests to messages, with at most one copy of a tensor. Internal to the client. A
// request has passed CheckRequest. Functions are pure: safe from any thread.
#ifndef FLASHCORE_CLIENT_CPP_ENCODE_H_
#define FLASHCORE_CLIENT_CPP_ENCODE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/memory.h"
#include "flashcore/attend.h"
#include "flashcore/v1/attention.pb.h"
#include "grpcpp/support/byte_buffer.h"

namespace flashcore::client {

v1::Layout ToProto(Layout layout);
v1::DType ToProto(DType dtype);
DType FromProto(v1::DType dtype);  // DTYPE_BFLOAT16, else FP16
v1::KvDType ToProto(KvDType kv_dtype);
KvDType FromProto(v1::KvDType kv_dtype);  // unknown: as the query
v1::Precision ToProto(Precision precision);
Precision FromProto(v1::Precision precision);  // unknown: 16 bits

// Where the tensors of a reply go, and what else the reply must have. Does not own the memory.
struct Destination {
  absl::Span<std::byte> output;
  absl::Span<float> lse;  // empty: not requested
  // The expected AttendResponse.sequence_lengths, [spans]. Unset: any, because the length before
  // the append is not known. Empty, as all K/V is inline: that must be empty, too.
  std::vector<std::optional<uint64_t>> sequence_lengths;
};

// Replaces `*out` by what the reply to `request` must be.
void SetDestination(const AttendRequest& request, Destination* out);

// Everything but the tensors. `out` is empty before.
void SetSmallFields(const AttendRequest& request, v1::AttendRequest* out);

// A serialized AttendRequest, and where its reply goes.
struct EncodedRequest {
  grpc::ByteBuffer message;
  Destination destination;
};

// For gRPC: the message has all tensors. They are slices of the caller's memory if `borrowed` is
// given, else they are copied once. INVALID_ARGUMENT if one is on a GPU; RESOURCE_EXHAUSTED if the
// message is larger than `max_message_bytes`. `timeout_ns`: only in a stream; 0: none.
absl::StatusOr<EncodedRequest> EncodeRequest(const AttendRequest& request, size_t max_message_bytes,
                                             BorrowedMemory* borrowed = nullptr,
                                             uint64_t timeout_ns = 0);

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_ENCODE_H_
