// AttendStream: many requests in flight, answered as they complete.
#ifndef FLASHCORE_SERVER_TRANSPORT_ATTEND_STREAM_H_
#define FLASHCORE_SERVER_TRANSPORT_ATTEND_STREAM_H_

#include <deque>
#include <memory>
#include <string>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/engine/fleet.h"
#include "server/transport/stream_reactor.h"
#include "server/transport/tensor_receiver.h"

namespace flashcore::server {

// The fleet outlives it.
//
// Reading, computing and writing overlap. At most one read and one write are with gRPC at a time.
// Flow control: reading pauses while `max_inflight` requests are unanswered, and while one waits
// for staging memory. The stream ends when nothing more will be read and every request is answered.
class AttendStreamReactor final
    : public StreamReactor<grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>> {
 public:
  AttendStreamReactor(Fleet* fleet, RpcContext* context, RpcMetrics* rpc, StreamSet* set,
                      int max_inflight, grpc::ServerContextBase* call, TimePoint deadline);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;

 private:
  struct Request {
    Request(Fleet* fleet, RpcContext* context, RpcMetrics* rpc, grpc::ByteBuffer* message,
            grpc::ServerContextBase* call)
        : receiver(fleet, rpc, message, &operation),
          scope(context, rpc),
          unsent(&context->unsent, call) {}
    AttendOperation operation;
    TensorReceiver receiver;
    RequestScope scope;
    grpc::ByteBuffer answer;
    UnsentReply unsent;
  };

  // Takes the message in incoming_ to the queue, or refuses it, with `refusal` if that is not OK.
  // While it waits for staging memory, nothing is read.
  void Receive(Request* request, const absl::Status& refusal) ABSL_LOCKS_EXCLUDED(mutex_);
  void Enqueue(Request* request, absl::Status received) ABSL_LOCKS_EXCLUDED(mutex_);
  // On a lane's thread, or on gRPC's for a refused request.
  void Complete(Request* request, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  void Advance() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CancelRequests() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Each message that the drain finds on its way gets an answer of its own, while others are
  // unanswered.
  bool Refuses() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return end_.has_value() && absl::IsUnavailable(*end_) && !cancelled_ && !finished_;
  }
  // Removes the oldest answer, which gRPC has `sent` or dropped.
  void EndAnswer(bool sent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Fleet* const fleet_;
  const size_t max_inflight_;
  const TimePoint deadline_;  // of the stream and of its requests

  grpc::ByteBuffer incoming_;  // of the read with gRPC, or of the request that is being received

  bool reading_ ABSL_GUARDED_BY(mutex_) = false;      // incoming_ is with gRPC
  bool receiving_ ABSL_GUARDED_BY(mutex_) = false;    // incoming_ is a request's, not yet queued
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;      // answers_.front() is with gRPC
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;  // there is nothing more to read
  std::unordered_map<Request*, std::unique_ptr<Request>> inflight_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::unique_ptr<Request>> answers_ ABSL_GUARDED_BY(mutex_);  // oldest first
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_ATTEND_STREAM_H_
