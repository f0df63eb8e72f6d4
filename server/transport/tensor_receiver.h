// Receives a message's tensors into staging memory.
#ifndef FLASHCORE_SERVER_TRANSPORT_TENSOR_RECEIVER_H_
#define FLASHCORE_SERVER_TRANSPORT_TENSOR_RECEIVER_H_

#include <functional>

#include "absl/status/status.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/base/clock.h"
#include "server/engine/fleet.h"
#include "server/request/request.h"
#include "server/telemetry/metrics.h"
#include "server/transport/message.h"

namespace flashcore::server {

// Receives one message. While its operation waits for staging memory, the message stays in the
// network's slices. Fleet, metrics, message and operation outlive it; it outlives the call of
// `done`.
class TensorReceiver {
 public:
  // Receiving begins now.
  TensorReceiver(Fleet* fleet, Metrics* metrics, grpc::ByteBuffer* message,
                 AttendOperation* operation)
      : fleet_(fleet),
        metrics_(metrics),
        message_(message),
        view_(*message),
        operation_(operation),
        start_(fleet->clock().Now()) {}
  // `message`, in one piece, outlives it too.
  TensorReceiver(Fleet* fleet, Metrics* metrics, absl::string_view message,
                 AttendOperation* operation)
      : fleet_(fleet),
        metrics_(metrics),
        message_(nullptr),
        view_(message),
        operation_(operation),
        start_(fleet->clock().Now()) {}

  TensorFields tensors;  // the places of the tensors in the message

  // `parsed` is the result of parsing the message. If OK, admits the operation and copies the
  // tensors once; the operation can then be queued.
  //
  // Calls `done` exactly once, with gRPC's message emptied: before it returns or, after a wait for
  // memory, on a thread of gRPC. The errors are those of Fleet::Admit.
  void Receive(const absl::Status& parsed, std::function<void(const absl::Status&)> done);

 private:
  void Finish(const absl::Status& status);

  Fleet* const fleet_;
  Metrics* const metrics_;
  grpc::ByteBuffer* const message_;  // null: in one piece
  const wire::MessageView view_;
  AttendOperation* const operation_;
  const TimePoint start_;
  std::function<void(const absl::Status&)> done_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_TENSOR_RECEIVER_H_
