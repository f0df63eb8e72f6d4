// What Attend and AttendStream have in common: one message in, one operation of the engine, one
// message out.
#ifndef FLASHCORE_SERVER_TRANSPORT_ATTEND_CALL_H_
#define FLASHCORE_SERVER_TRANSPORT_ATTEND_CALL_H_

#include <string>

#include "absl/status/status.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/core/fleet.h"
#include "server/core/request.h"
#include "server/telemetry/metrics.h"

namespace flashcore::server {

// Parses `message`, an AttendRequest, has the engine check it, and copies its tensors, once, from
// the network's slices to staging memory. On success `operation` can be submitted. `*message` is
// emptied as soon as it is not needed any more, on failure too. `*well_formed` tells whether the
// message could be parsed at all; if so, operation->request.request_id is set even on failure.
absl::Status ReceiveAttend(Fleet* fleet, Metrics* metrics, grpc::ByteBuffer* message,
                           AttendOperation* operation, bool* well_formed);

// The AttendResponse of an operation that has ended with OK. The tensors are not copied: the
// reply's slices point at the operation's staging memory, which goes back to its pool when gRPC
// drops them.
grpc::ByteBuffer EncodeReply(AttendOperation* operation);

// The AttendResponse of one failed request of a stream.
grpc::ByteBuffer EncodeError(const std::string& request_id, const absl::Status& status);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_ATTEND_CALL_H_
