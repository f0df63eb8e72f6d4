// Parses messages that carry tensors: decodes the small fields, leaves tensors in the network's
// slices.
#ifndef FLASHCORE_SERVER_TRANSPORT_MESSAGE_H_
#define FLASHCORE_SERVER_TRANSPORT_MESSAGE_H_

#include <array>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "google/protobuf/message_lite.h"
#include "grpcpp/support/byte_buffer.h"
#include "proto/wire.h"
#include "server/request/request.h"

namespace flashcore::server {

// The input tensors' fields, indexed by Tensor; field number 0: the message type has no such
// tensor.
using TensorFields = std::array<wire::LargeField, kValue + 1>;

// Parses `message` into `*parsed`, except the fields whose numbers are set in `tensors`, whose
// positions it records. INVALID_ARGUMENT if it is not well-formed protobuf.
absl::Status ParseMessage(const grpc::ByteBuffer& message, absl::Span<wire::LargeField> tensors,
                          google::protobuf::MessageLite* parsed);

// Clears `*message`; after a large one, also returns the freed heap to the system.
void ReleaseMessage(grpc::ByteBuffer* message);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_MESSAGE_H_
