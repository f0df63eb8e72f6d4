// One AttendStream: many requests in flight, answered as they complete.
#ifndef FLASHCORE_SERVER_TRANSPORT_ATTEND_STREAM_H_
#define FLASHCORE_SERVER_TRANSPORT_ATTEND_STREAM_H_

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/base/mutex.h"
#include "server/engine/fleet.h"
#include "server/memory/shared_memory.h"
#include "server/transport/rpc_scope.h"
#include "server/transport/stream_set.h"
#include "server/transport/tensor_receiver.h"

namespace flashcore::server {

// Deletes itself when the stream has ended. Fleet, memory, context, metrics and set outlive it.
//
// Reading, computing and writing overlap. At most one read and one write are with gRPC at a time;
// reading pauses while `max_inflight` requests are unanswered, and while one waits for staging
// memory, which is how the stream is flow controlled. The stream ends when nothing more will be
// read and all that was read is answered.
class AttendStreamReactor final
    : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
      public RequestStream {
 public:
  // `client` is that of every request; an error ends the stream.
  AttendStreamReactor(Fleet* fleet, const SharedMemory* memory, RpcContext* context,
                      RpcMetrics* rpc, StreamSet* set, int max_inflight,
                      absl::StatusOr<std::string> client, TimePoint deadline);

  void StopReading(const absl::Status& status) override ABSL_LOCKS_EXCLUDED(mutex_);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  struct Request {
    Request(Fleet* fleet, RpcContext* context, RpcMetrics* rpc, grpc::ByteBuffer* message)
        : receiver(fleet, context->metrics, message, &operation), scope(context, rpc) {}
    AttendOperation operation;
    TensorReceiver receiver;
    RequestScope scope;
    grpc::ByteBuffer answer;
  };

  // Takes the message in incoming_, up to its submission or its refusal. While it waits for staging
  // memory, it is the one message that the stream holds: nothing is read behind it.
  void Receive(Request* request) ABSL_LOCKS_EXCLUDED(mutex_);
  void Submit(Request* request, absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  // On a lane's thread, or on gRPC's for a request that was refused.
  void Complete(Request* request, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Starts whatever can be started now: a write, a read, or the end.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropAnswers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Fleet* const fleet_;
  const SharedMemory* const memory_;  // as ParseAttend wants it
  RpcContext* const context_;
  RpcMetrics* const rpc_;
  StreamSet* const set_;
  const size_t max_inflight_;
  const std::string client_;
  const TimePoint deadline_;  // of the stream, and so of each of its requests
  RpcScope scope_;

  grpc::ByteBuffer incoming_;  // of the read that is with gRPC, or being received

  Mutex mutex_;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;    // incoming_ is with gRPC
  bool receiving_ ABSL_GUARDED_BY(mutex_) = false;  // incoming_ is a request's, not yet submitted
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;    // answers_.front() is with gRPC
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  // Set when nothing more will be read: how the stream ends once everything is answered.
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<Request*, std::unique_ptr<Request>> inflight_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::unique_ptr<Request>> answers_ ABSL_GUARDED_BY(mutex_);  // ready, in order
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_ATTEND_STREAM_H_
