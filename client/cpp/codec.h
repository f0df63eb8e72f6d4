// Requests to messages and messages to answers, with at most one copy of each tensor each way.
// Internal to the client. Functions are pure: safe from any thread.
#ifndef FLASHCORE_CLIENT_CPP_CODEC_H_
#define FLASHCORE_CLIENT_CPP_CODEC_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/attend.h"
#include "client/cpp/lent_memory.h"
#include "client/cpp/region_table.h"
#include "flashcore/v1/attention.pb.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/status.h"
#include "proto/wire.h"

namespace flashcore::client {

v1::Layout ToProto(Layout layout);
v1::DType ToProto(DType dtype);

// Where the tensors of an answer go, memory of the caller of the RPC, and what else the answer must
// have.
struct Destination {
  absl::Span<std::byte> output;  // empty: the server writes it to shared memory
  absl::Span<float> lse;         // empty: likewise, or not wanted
  // Of AttendResponse.sequence_lengths, [spans]; unset: any, for a sequence whose length before the
  // append is not known. Empty: all K/V is inline, and so must the answer's be.
  std::vector<std::optional<uint64_t>> sequence_lengths;
};

// A serialized AttendRequest, and where its answer goes.
struct EncodedRequest {
  grpc::ByteBuffer message;
  Destination destination;
};

// Tensors that lie in one of `regions` stay there. The others lie in the message where the request
// has them if `lent` is given; without, they are copied once. INVALID_ARGUMENT from CheckRequest;
// RESOURCE_EXHAUSTED if larger than `max_message_bytes`.
absl::StatusOr<EncodedRequest> EncodeRequest(const AttendRequest& request,
                                             const RegionTable& regions, size_t max_message_bytes,
                                             LentMemory* lent = nullptr);

// An AttendResponse whose tensors still lie in its message. Does not own the message.
struct Answer {
  AttendResult result;
  absl::Status status;  // of this request; only an AttendStream sets it
  wire::LargeField output;
  wire::LargeField lse;
};

// Splits the message; INTERNAL if it is not an AttendResponse. `max_spans` is the most spans a
// request behind it has.
absl::StatusOr<Answer> ParseAnswer(const grpc::ByteBuffer& message, size_t max_spans);

// Copies the tensors of `answer` from `message` to their destination. INTERNAL, nothing copied, if
// the sizes or the sequence_lengths are not exactly those of the destination.
absl::Status CopyAnswer(const grpc::ByteBuffer& message, const Answer& answer,
                        const Destination& destination);

// Both, for the answer to a unary Attend. On an error `result` is left alone.
absl::Status TakeReply(const grpc::ByteBuffer& message, const Destination& destination,
                       AttendResult* result);

// An EchoRequest or EchoResponse around `payload`, and back. DecodeEcho is INTERNAL unless the
// reply carries exactly as many bytes as `reply` has.
grpc::ByteBuffer EncodeEcho(absl::Span<const std::byte> payload, size_t reply_bytes);
absl::Status DecodeEcho(const grpc::ByteBuffer& message, absl::Span<std::byte> reply);

// Code and message as they came. Details are dropped; a message is never left empty.
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_CODEC_H_
