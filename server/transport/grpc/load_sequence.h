// LoadSequence: K/V rows appended chunk by chunk.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_LOAD_SEQUENCE_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_LOAD_SEQUENCE_H_

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/transport/grpc/stream_reactor.h"
#include "server/transport/rpc/exchange.h"
#include "server/transport/rpc/load_chunks.h"

namespace flashcore::server {

// The response outlives it.
//
// One chunk is in the engine at a time, because chunks are appended in order. Meanwhile the next
// one is received into staging memory, and then reading pauses: that is the flow control. Each
// chunk counts as one request.
class LoadSequenceReactor final : public StreamReactor<grpc::ServerReadReactor<grpc::ByteBuffer>> {
 public:
  LoadSequenceReactor(const Exchange::Origin& origin, StreamSet* set, grpc::ServerContextBase* call,
                      TimePoint deadline, grpc::ByteBuffer* response);
  ~LoadSequenceReactor() override;

  void OnReadDone(bool ok) override;

 private:
  class Chunk;

  // receiving_ has its tensors in staging memory, or has failed.
  void Received(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Moves received_ to running_ if it can be queued. Returns it, or null.
  Chunk* StartNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // running_ is appended, or refused.
  void Completed(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  void Advance() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CancelRequests() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WriteResponse();

  const Exchange::Origin origin_;
  const TimePoint deadline_;
  grpc::ByteBuffer* const response_;

  // Used only by the thread that receives.
  grpc::ByteBuffer incoming_;
  LoadChunks chunks_;

  bool reading_ ABSL_GUARDED_BY(mutex_) = false;              // incoming_ is with gRPC
  std::unique_ptr<Chunk> receiving_ ABSL_GUARDED_BY(mutex_);  // from incoming_ to staging memory
  std::unique_ptr<Chunk> received_ ABSL_GUARDED_BY(mutex_);   // the next one, in staging memory
  std::unique_ptr<Chunk> running_ ABSL_GUARDED_BY(mutex_);    // in the engine
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_LOAD_SEQUENCE_H_
