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
// network's slices. Fleet, metrics of the RPC, message and operation outlive it; it outlives the
// call of `done`.
class TensorReceiver {
 public:
  // Receiving begins now.
  TensorReceiver(Fleet* fleet, RpcMetrics* rpc, grpc::ByteBuffer* message,
                 AttendOperation* operation)
      : TensorReceiver(fleet, rpc, message, wire::MessageView(*message), operation) {}
  // `message`, in one piece, outlives it too.
  TensorReceiver(Fleet* fleet, RpcMetrics* rpc, absl::string_view message,
                 AttendOperation* operation)
      : TensorReceiver(fleet, rpc, nullptr, wire::MessageView(message), operation) {}

  TensorFields tensors;  // the places of the tensors in the message

  // `parsed` is the result of parsing the message. If OK, admits the operation and copies the
  // tensors once; the operation can then be queued.
  //
  // Calls `done` exactly once, with gRPC's message emptied: before it returns or, after a wait for
  // memory, on a thread of gRPC. The errors are those of Fleet::Admit.
  void Receive(const absl::Status& parsed, std::function<void(const absl::Status&)> done);

 private:
  TensorReceiver(Fleet* fleet, RpcMetrics* rpc, grpc::ByteBuffer* message,
                 const wire::MessageView& view, AttendOperation* operation)
      : fleet_(fleet),
        rpc_(rpc),
        message_(message),
        view_(view),
        operation_(operation),
        start_(fleet->clock().Now()) {
    operation->rpc = rpc->number();
  }

  void Finish(const absl::Status& status);

  Fleet* const fleet_;
  RpcMetrics* const rpc_;            // of the RPC that the message belongs to
  grpc::ByteBuffer* const message_;  // null: in one piece
  const wire::MessageView view_;
  AttendOperation* const operation_;
  const TimePoint start_;
  std::function<void(const absl::Status&)> done_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_TENSOR_RECEIVER_H_
