// The way of a message's tensors to staging memory, and the wait for it.
#ifndef FLASHCORE_SERVER_TRANSPORT_TENSOR_RECEIVER_H_
#define FLASHCORE_SERVER_TRANSPORT_TENSOR_RECEIVER_H_

#include <functional>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "grpcpp/alarm.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/engine/fleet.h"
#include "server/request/request.h"
#include "server/telemetry/metrics.h"
#include "server/transport/message.h"

namespace flashcore::server {

// Receives one message. While staging memory is full, the message stays in the network's slices
// and no thread waits: an alarm of gRPC's goes off when the memory is there, or when the wait is
// over. Fleet, metrics, message and operation outlive it; it outlives the call of `done`.
//
// Locks: its own, then the pool's, then those inside gRPC's timers. The pool's is taken by whoever
// returns memory, also within gRPC, and nothing that is called under it takes ours.
class TensorReceiver {
 public:
  // Receiving begins now.
  TensorReceiver(Fleet* fleet, Metrics* metrics, grpc::ByteBuffer* message,
                 AttendOperation* operation)
      : fleet_(fleet),
        metrics_(metrics),
        message_(message),
        operation_(operation),
        start_(fleet->clock().Now()) {}

  TensorFields tensors;  // where they are in the message

  // `parsed` is what came of parsing the message. If OK, has the engine check operation->request,
  // and copies the tensors, once. The operation can then be submitted.
  //
  // Calls `done` exactly once, with `*message` emptied: before it returns or, if it had to wait for
  // memory, on a thread of gRPC's. RESOURCE_EXHAUSTED after Engine::Options::staging_wait;
  // DEADLINE_EXCEEDED, CANCELLED.
  void Start(const absl::Status& parsed, std::function<void(const absl::Status&)> done)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Nobody waits for the operation any more. From any thread.
  void Cancel() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Wait() ABSL_LOCKS_EXCLUDED(mutex_);
  // On the alarm's thread.
  void EndWait() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status WhyNoMemory() const;
  void Finish(const absl::Status& status);

  Fleet* const fleet_;
  Metrics* const metrics_;
  grpc::ByteBuffer* const message_;
  AttendOperation* const operation_;
  const TimePoint start_;
  TimePoint wait_start_;
  std::function<void(const absl::Status&)> done_;

  Mutex mutex_;
  // Set while or after the wait. StagingClaim::granted uses it without our lock: it is there before
  // the claim is in line, and until it has left it.
  std::optional<grpc::Alarm> alarm_;
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);  // not OK: did not get in line
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_TENSOR_RECEIVER_H_
