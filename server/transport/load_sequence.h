// One LoadSequence: K/V rows appended chunk by chunk.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOAD_SEQUENCE_H_
#define FLASHCORE_SERVER_TRANSPORT_LOAD_SEQUENCE_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "flashcore/v1/attention.pb.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/base/mutex.h"
#include "server/engine/fleet.h"
#include "server/kv/sequence.h"
#include "server/transport/rpc_scope.h"
#include "server/transport/stream_set.h"
#include "server/transport/tensor_receiver.h"

namespace flashcore::server {

// Deletes itself when the stream has ended. Fleet, context, metrics, set and response outlive it.
//
// One chunk is in the engine at a time, because a chunk may only be appended when the one before
// has been; meanwhile the next one is received into staging memory, and then reading pauses, which
// is how the stream is flow controlled. Each chunk counts as one request.
class LoadSequenceReactor final : public grpc::ServerReadReactor<grpc::ByteBuffer>,
                                  public RequestStream {
 public:
  // `client` is that of every chunk; an error ends the stream.
  LoadSequenceReactor(Fleet* fleet, RpcContext* context, RpcMetrics* rpc, StreamSet* set,
                      absl::StatusOr<std::string> client, TimePoint deadline,
                      grpc::ByteBuffer* response);

  void StopReading(const absl::Status& status) override ABSL_LOCKS_EXCLUDED(mutex_);

  void OnReadDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  struct Chunk {
    Chunk(Fleet* fleet, RpcContext* context, RpcMetrics* rpc, grpc::ByteBuffer* message)
        : receiver(fleet, context->metrics, message, &operation), scope(context, rpc) {}
    AttendOperation operation;
    TensorReceiver receiver;
    RequestScope scope;
  };

  // The message in incoming_.
  absl::Status Parse(Chunk* chunk);
  // receiving_ has its tensors in staging memory, or has failed.
  void Received(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Fills in operation->request from the message, but for its tensors' sizes.
  absl::Status ToRequest(const v1::LoadSequenceRequest& message, AttendRequest* request);
  void Submit(Chunk* chunk) ABSL_LOCKS_EXCLUDED(mutex_);
  // On a lane's thread, or on gRPC's for a chunk that was refused.
  void Complete(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Starts whatever can be started now: a read, or the end. Returns a chunk to submit, or null.
  Chunk* Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Fleet* const fleet_;
  RpcContext* const context_;
  RpcMetrics* const rpc_;
  StreamSet* const set_;
  const std::string client_;
  const TimePoint deadline_;
  grpc::ByteBuffer* const response_;
  RpcScope scope_;

  // Of the thread that receives.
  grpc::ByteBuffer incoming_;
  std::optional<SequenceId> sequence_;  // after the first message
  SequenceShape shape_;

  Mutex mutex_;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;  // incoming_ is with gRPC
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);   // nothing more will be read
  std::unique_ptr<Chunk> running_ ABSL_GUARDED_BY(mutex_);    // in the engine
  std::unique_ptr<Chunk> received_ ABSL_GUARDED_BY(mutex_);   // the next one, in staging memory
  std::unique_ptr<Chunk> receiving_ ABSL_GUARDED_BY(mutex_);  // on its way there, from incoming_
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_LOAD_SEQUENCE_H_
