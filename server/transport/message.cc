#include "server/transport/message.h"

#include <malloc.h>

#include <cstddef>
#include <string>

namespace flashcore::server {
namespace {

// Bytes of a message's fields other than its tensors: enough for max_spans spans with all their
// fields set, and little enough that what the generated classes make of it stays small.
constexpr size_t kMaxSmallFieldBytes = 256 << 10;

constexpr size_t kUsualSmallFieldBytes = 256;  // of a request with few spans

// The heap keeps what is freed. For a message as large as this, giving it back to the system costs
// little beside having received it, and keeps a few large messages from growing the process for
// good.
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
