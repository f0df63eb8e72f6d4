// The messages of Attend and AttendStream.
#ifndef FLASHCORE_SERVER_TRANSPORT_ATTEND_CALL_H_
#define FLASHCORE_SERVER_TRANSPORT_ATTEND_CALL_H_

#include <string>

#include "absl/status/status.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/memory/shared_memory.h"
#include "server/request/request.h"
#include "server/transport/message.h"

namespace flashcore::server {

// Parses `message`, a v1::AttendRequest, into operation->request, without validating it, and
// `*tensors`. `memory` resolves the ranges of tensors in shared memory; null if the client cannot
// share any. `*well_formed`: the message is valid protobuf; operation->request.request_id is then
// set even on failure.
absl::Status ParseAttend(const grpc::ByteBuffer& message, const SharedMemory* memory,
                         AttendOperation* operation, TensorFields* tensors, bool* well_formed);

// The v1::AttendResponse of an operation that completed with OK. Tensors are not copied: the
// reply's slices point into the operation's staging memory, which is released when gRPC drops them.
grpc::ByteBuffer EncodeReply(AttendOperation* operation);

// The v1::AttendResponse of a failed request of a stream.
grpc::ByteBuffer EncodeError(const std::string& request_id, const absl::Status& status);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_ATTEND_CALL_H_
