#include "server/transport/message.h"

#include <malloc.h>

#include <cstddef>
#include <string>

namespace flashcore::server {
namespace {

// Limit on a message's fields other than its tensors: enough for max_spans spans with all fields
// set, and small enough that the generated classes stay small.
constexpr size_t kMaxSmallFieldBytes = 256 << 10;

constexpr size_t kUsualSmallFieldBytes = 256;  // a request with few spans

// The heap retains freed memory. From this message size on, returning it to the system costs little
// compared to receiving the message, and a few large messages do not grow the process for good.
constexpr size_t kTrimBytes = 8 << 20;

}  // namespace

absl::Status ParseMessage(const grpc::ByteBuffer& message, absl::Span<wire::LargeField> tensors,
                          google::protobuf::MessageLite* parsed) {
  std::string small;
  small.reserve(kUsualSmallFieldBytes);
  if (absl::Status status = wire::SplitMessage(message, kMaxSmallFieldBytes, tensors, &small);
      !status.ok()) {
    return status;
  }
  if (!parsed->ParseFromString(small)) {
    return absl::InvalidArgumentError(
        "message: a field other than the tensors is not well-formed protobuf");
  }
  return absl::OkStatus();
}

void ReleaseMessage(grpc::ByteBuffer* message) {
  const bool trim = message->Length() >= kTrimBytes;
  message->Clear();
  if (trim) malloc_trim(0);
}

}  // namespace flashcore::server
