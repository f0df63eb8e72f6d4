// Converts requests to messages and messages to results, with at most one copy of a tensor each
// way. Internal to the client. Functions are pure: safe from any thread.
#ifndef FLASHCORE_CLIENT_CPP_CODEC_H_
#define FLASHCORE_CLIENT_CPP_CODEC_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/memory.h"
#include "flashcore/attend.h"
#include "flashcore/v1/attention.pb.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/status.h"
#include "proto/wire/message.h"

namespace flashcore::client {

v1::Layout ToProto(Layout layout);
v1::DType ToProto(DType dtype);
DType FromProto(v1::DType dtype);  // DTYPE_BFLOAT16, else FP16

// Where the tensors of a reply go, and what else the reply must have. Does not own the memory.
struct Destination {
  absl::Span<std::byte> output;
  absl::Span<float> lse;  // empty: not requested
  // What AttendResponse.sequence_lengths must be, [spans]. Unset: any, because the length before
  // the append is not known. Empty, as all K/V is inline: that must be empty, too.
  std::vector<std::optional<uint64_t>> sequence_lengths;
};

// Replaces `*out` by what the reply to `request` must be.
void SetDestination(const AttendRequest& request, Destination* out);

// INTERNAL unless the lengths are those in `want`, where they are set.
absl::Status CheckSequenceLengths(const std::vector<uint64_t>& lengths,
                                  const std::vector<std::optional<uint64_t>>& want);

// Everything but the tensors. `out` is empty before.
void SetSmallFields(const AttendRequest& request, v1::AttendRequest* out);

// What a response has besides its tensors and its status. The byte counts and attempts stay.
void SetResult(const v1::AttendResponse& response, AttendResult* result);

// A serialized AttendRequest, and where its reply goes.
struct EncodedRequest {
  grpc::ByteBuffer message;
  Destination destination;
};

// For gRPC: the message has all tensors. They are slices of the caller's memory if `borrowed` is
// given, else they are copied once. INVALID_ARGUMENT from CheckRequest; RESOURCE_EXHAUSTED if the
// message is larger than `max_message_bytes`.
absl::StatusOr<EncodedRequest> EncodeRequest(const AttendRequest& request, size_t max_message_bytes,
                                             BorrowedMemory* borrowed = nullptr);

// An AttendResponse whose tensors are still in its message. Does not own the message.
struct Answer {
  AttendResult result;
  absl::Status status;  // of this request; only an AttendStream sets it
  wire::LargeField output;
  wire::LargeField lse;
};

// Splits the message; INTERNAL if it is not an AttendResponse. Its request has at most `max_spans`
// spans.
absl::StatusOr<Answer> ParseAnswer(const grpc::ByteBuffer& message, size_t max_spans);

// Copies the tensors of `answer` from `message` to their destination. INTERNAL, nothing copied, if
// the sizes or the sequence_lengths are not exactly those of the destination.
absl::Status CopyAnswer(const grpc::ByteBuffer& message, const Answer& answer,
                        const Destination& destination);

// ParseAnswer and CopyAnswer, for the reply to a unary Attend. `result` is set only if OK.
absl::Status TakeReply(const grpc::ByteBuffer& message, const Destination& destination,
                       AttendResult* result);

// The EchoRequest for `reply`, as EncodeRequest makes an AttendRequest; and its EchoResponse as an
// Answer whose output is the payload, for CopyAnswer.
EncodedRequest EncodeEcho(const std::string& request_id, absl::Span<const std::byte> payload,
                          absl::Span<std::byte> reply, BorrowedMemory* borrowed = nullptr);
absl::StatusOr<Answer> ParseEcho(const grpc::ByteBuffer& message);

// Same code and message, without details. An empty message is replaced.
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_CODEC_H_
