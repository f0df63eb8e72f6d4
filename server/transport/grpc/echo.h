// The answers of Echo and EchoStream: the baselines for Attend and AttendStream.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_ECHO_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_ECHO_H_

#include <cstddef>
#include <deque>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "grpcpp/support/slice.h"
#include "server/transport/grpc/stream_reactor.h"
#include "server/transport/rpc/rpc_scope.h"

namespace flashcore::server {

// Treats bytes as Attend does: copies the payload once out of the message, releases the message,
// and answers with slices of memory that is not copied. Thread-safe.
class EchoReplier {
 public:
  // Replies have at most `max_reply_bytes`. The context outlives this.
  EchoReplier(size_t max_reply_bytes, const RpcContext* context);

  // The v1::EchoResponse to `*request`, a v1::EchoRequest, which is released.
  absl::StatusOr<grpc::ByteBuffer> Reply(const grpc::ByteBuffer* request) const;

 private:
  const RpcContext* const context_;
  const grpc::Slice reply_;  // every reply is a sub-slice of it
};

// Replier outlives it. As in AttendStreamReactor, at most one read and one write are with gRPC at a
// time, and reading pauses while `max_inflight` requests are unanswered.
class EchoStreamReactor final
    : public StreamReactor<grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>> {
 public:
  EchoStreamReactor(const EchoReplier* replier, RpcContext* context, RpcMetrics* rpc,
                    StreamSet* set, int max_inflight, grpc::ServerContextBase* call);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;

 private:
  struct Answer {
    Answer(RpcContext* context, RpcMetrics* rpc, grpc::ServerContextBase* call,
           ClientConnection* connection)
        : scope(context, rpc), unsent(&context->unsent, CancelRpc(call, connection)) {}
    RequestScope scope;
    grpc::ByteBuffer message;
    UnsentReply unsent;
  };

  void Advance() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Removes the oldest answer, which gRPC has `sent` or dropped.
  void EndAnswer(bool sent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const EchoReplier* const replier_;
  const size_t max_inflight_;

  grpc::ByteBuffer incoming_;  // of the read with gRPC, or of the request that is being answered

  bool reading_ ABSL_GUARDED_BY(mutex_) = false;    // incoming_ is with gRPC
  bool answering_ ABSL_GUARDED_BY(mutex_) = false;  // incoming_ is with the replier
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;    // answers_.front() is with gRPC
  std::deque<std::unique_ptr<Answer>> answers_ ABSL_GUARDED_BY(mutex_);  // oldest first
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_ECHO_H_
