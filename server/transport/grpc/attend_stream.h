// AttendStream: many requests in flight, answered as they complete.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_ATTEND_STREAM_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_ATTEND_STREAM_H_

#include <deque>
#include <memory>
#include <string>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/transport/grpc/stream_reactor.h"
#include "server/transport/rpc/exchange.h"

namespace flashcore::server {

// Reading, computing and writing overlap. At most one read and one write are with gRPC at a time.
// Flow control: reading pauses while `max_inflight` requests are unanswered, and while one waits
// for staging memory. The stream ends when nothing more will be read and every request is answered.
class AttendStreamReactor final
    : public StreamReactor<grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>> {
 public:
  AttendStreamReactor(const Exchange::Origin& origin, StreamSet* set, int max_inflight,
                      grpc::ServerContextBase* call, TimePoint deadline);
  ~AttendStreamReactor() override;

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;

 private:
  class Request;

  // Whether no request in flight has this id, which is then taken until its request is complete.
  bool TakeId(absl::string_view request_id) ABSL_LOCKS_EXCLUDED(mutex_);
  // The message in incoming_ is in the queue, or refused.
  void EndReceiving() ABSL_LOCKS_EXCLUDED(mutex_);
  void AddAnswer(Request* request) ABSL_LOCKS_EXCLUDED(mutex_);
  void Advance() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CancelRequests() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Each message that the drain finds on its way gets an answer of its own, while others are
  // unanswered.
  bool Refuses() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return end_.has_value() && absl::IsUnavailable(*end_) && !cancelled_ && !finished_;
  }
  // Removes the oldest answer, which gRPC has `sent` or dropped.
  void EndAnswer(bool sent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Exchange::Origin origin_;
  const size_t max_inflight_;
  const TimePoint deadline_;  // of the stream and of its requests

  grpc::ByteBuffer incoming_;  // of the read with gRPC, or of the request that is being received

  bool reading_ ABSL_GUARDED_BY(mutex_) = false;      // incoming_ is with gRPC
  bool receiving_ ABSL_GUARDED_BY(mutex_) = false;    // incoming_ is a request's, not yet queued
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;      // answers_.front() is with gRPC
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;  // there is nothing more to read
  std::unordered_map<Request*, std::unique_ptr<Request>> inflight_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_set<absl::string_view> ids_ ABSL_GUARDED_BY(mutex_);    // of those in inflight_
  std::deque<std::unique_ptr<Request>> answers_ ABSL_GUARDED_BY(mutex_);  // oldest first
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_ATTEND_STREAM_H_
