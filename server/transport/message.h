// Messages that carry tensors: their small fields parsed, their tensors left in the network's
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

// Of the inputs, by Tensor; number 0: the message has none.
using TensorFields = std::array<wire::LargeField, kValue + 1>;

// Parses `message` into `*parsed` but for the fields whose numbers are set in `tensors`, of which
// it fills in where they are. INVALID_ARGUMENT if it is not well-formed protobuf.
absl::Status ParseMessage(const grpc::ByteBuffer& message, absl::Span<wire::LargeField> tensors,
                          google::protobuf::MessageLite* parsed);

// Empties `*message` and sees to it that a large one leaves nothing behind.
void ReleaseMessage(grpc::ByteBuffer* message);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_MESSAGE_H_
