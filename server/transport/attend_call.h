// What Attend and AttendStream have in common: their messages.
#ifndef FLASHCORE_SERVER_TRANSPORT_ATTEND_CALL_H_
#define FLASHCORE_SERVER_TRANSPORT_ATTEND_CALL_H_

#include <string>

#include "absl/status/status.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/memory/shared_memory.h"
#include "server/request/request.h"
#include "server/transport/message.h"

namespace flashcore::server {

// Parses `message`, an AttendRequest: fills in operation->request, without checking it, and
// `*tensors`. `memory`, where those are that did not come, is null if the client cannot share any.
// `*well_formed` tells whether the message could be parsed at all; if so,
// operation->request.request_id is set even on failure.
absl::Status ParseAttend(const grpc::ByteBuffer& message, const SharedMemory* memory,
                         AttendOperation* operation, TensorFields* tensors, bool* well_formed);

// The AttendResponse of an operation that has ended with OK. Tensors that are to travel are not
// copied: the reply's slices point at the operation's staging memory, which goes back to its pool
// when gRPC drops them.
grpc::ByteBuffer EncodeReply(AttendOperation* operation);

// The AttendResponse of one failed request of a stream.
grpc::ByteBuffer EncodeError(const std::string& request_id, const absl::Status& status);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_ATTEND_CALL_H_
