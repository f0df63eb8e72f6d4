// Converts messages to results, with at most one copy of a tensor. Internal to the client.
// Functions are pure: safe from any thread.
#ifndef FLASHCORE_CLIENT_CPP_ANSWER_H_
#define FLASHCORE_CLIENT_CPP_ANSWER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/encode.h"
#include "flashcore/attend.h"
#include "flashcore/v1/attention.pb.h"
#include "grpcpp/support/byte_buffer.h"
#include "proto/wire/message.h"

namespace flashcore::client {

// Sets the fields of a response other than its tensors and its status. The byte counts and attempts
// stay.
void SetResult(const v1::AttendResponse& response, AttendResult* result);

// INTERNAL unless the lengths are those in `want`, where they are set.
absl::Status CheckSequenceLengths(const std::vector<uint64_t>& lengths,
                                  const std::vector<std::optional<uint64_t>>& want);

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

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_ANSWER_H_
