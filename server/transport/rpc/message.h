// The messages that carry tensors. Parsing decodes the small fields and leaves the tensors in the
// network's slices.
#ifndef FLASHCORE_SERVER_TRANSPORT_RPC_MESSAGE_H_
#define FLASHCORE_SERVER_TRANSPORT_RPC_MESSAGE_H_

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "google/protobuf/message_lite.h"
#include "proto/wire/message.h"
#include "server/kv/operation.h"
#include "server/memory/regions.h"
#include "server/memory/staging_pool.h"
#include "server/request/request.h"

namespace flashcore::server {

// The message of a request: bytes of its own, or slices that belong to a transport.
class RequestMessage {
 public:
  explicit RequestMessage(std::string bytes) : bytes_(std::move(bytes)) {}
  // `release` frees the memory of `slices`.
  RequestMessage(const wire::MessageView& slices, std::function<void()> release)
      : slices_(slices), release_(std::move(release)) {}
  RequestMessage(RequestMessage&&) = default;

  // Until Release.
  wire::MessageView view() const {
    return release_ ? slices_ : wire::MessageView(absl::string_view(bytes_));
  }
  // Frees the memory. Call it at most once.
  void Release() {
    if (release_) return release_();
    bytes_ = std::string();
  }

 private:
  std::string bytes_;
  wire::MessageView slices_{absl::string_view()};
  std::function<void()> release_;  // null: the message is bytes_
};

// The input tensors' fields, indexed by Tensor; field number 0: the message type has no such
// tensor.
using TensorFields = std::array<wire::LargeField, kValue + 1>;

// Parses `message` into `*parsed`, except the fields whose numbers are set in `tensors`, whose
// positions it records. INVALID_ARGUMENT if it is not well-formed protobuf.
absl::Status ParseMessage(const wire::MessageView& message, absl::Span<wire::LargeField> tensors,
                          google::protobuf::MessageLite* parsed);

// Parses `message`, a v1::AttendRequest, into operation->request, without validating it, and
// `*tensors`. `regions` resolves the ranges of tensors in shared memory; null over gRPC.
// `*well_formed`: the message is valid protobuf; operation->request.request_id is then set even on
// failure.
absl::Status ParseAttend(const wire::MessageView& message, const Regions* regions,
                         AttendOperation* operation, TensorFields* tensors, bool* well_formed);
// The same of a request outside of AttendStream, whose deadline comes otherwise: INVALID_ARGUMENT
// if it has a timeout_ns.
absl::Status ParseSingleAttend(const wire::MessageView& message, const Regions* regions,
                               AttendOperation* operation, TensorFields* tensors);

// A reply whose tensors stay where they are: the message is `bytes` of the first piece, its staged
// bytes, `bytes` of the second piece, and so on.
struct EncodedReply {
  struct Piece {
    std::string bytes;
    size_t offset = 0;  // of the staged bytes, in `staging`
    size_t staged = 0;  // how many they are
  };

  absl::InlinedVector<Piece, 2> pieces;  // at most one a tensor, and at least one
  StagingBuffer staging;
};

// The v1::AttendResponse of an operation that completed with OK, whose results it takes over.
EncodedReply EncodeReply(AttendOperation* operation);

// The bytes of that reply that are staging memory.
size_t StagedReplyBytes(const AttendOperation& operation);

// The v1::AttendResponse of a failed request of a stream.
std::string EncodeError(const std::string& request_id, const absl::Status& status);

// The same replies in one piece, for the local socket and its rings: `*out` is the message.
// MaxReplyBytes is a limit of the first one's size, for a request that was admitted. `max_bytes` of
// the second cut its message, and are enough for a request_id; an ErrorInfo that takes more than
// half of what is left is left out.
size_t MaxReplyBytes(const AttendRequest& request);
// INVALID_ARGUMENT if that is more than `room`, which is that of a `place`.
absl::Status CheckReplyFits(const AttendRequest& request, size_t room, const char* place);
void WriteReply(AttendOperation* operation, std::string* out);
void WriteError(const std::string& request_id, const absl::Status& status, size_t max_bytes,
                std::string* out);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_RPC_MESSAGE_H_
