// One RegisterMemory: a region of shared memory, for as long as the stream lives.
#ifndef FLASHCORE_SERVER_TRANSPORT_REGISTER_MEMORY_H_
#define FLASHCORE_SERVER_TRANSPORT_REGISTER_MEMORY_H_

#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "flashcore/v1/attention.pb.h"
#include "grpcpp/support/server_callback.h"
#include "server/base/mutex.h"
#include "server/memory/shared_memory.h"
#include "server/transport/rpc_scope.h"
#include "server/transport/stream_set.h"

namespace flashcore::server {

// Of a server that does not allow it, or a client that is not on a Unix socket.
absl::Status CannotShareMemory();

// Deletes itself when the stream has ended. Memory, context, metrics and set outlive it.
//
// The name that a client gives may be of anybody's segment that the server can open. So the client
// has to show that it can write there before the segment is mapped; until then the server reads its
// first bytes and nothing more, and keeps nothing open.
//
// One read or one write is with gRPC at a time: the client and the server take turns.
class RegisterMemoryReactor final
    : public grpc::ServerBidiReactor<v1::RegisterMemoryRequest, v1::RegisterMemoryResponse>,
      public RequestStream {
 public:
  // `memory` is null if the client can share none. An error for a client ends the stream.
  RegisterMemoryReactor(SharedMemory* memory, RpcContext* context, RpcMetrics* rpc, StreamSet* set,
                        absl::StatusOr<std::string> client);

  void StopReading(const absl::Status& status) override ABSL_LOCKS_EXCLUDED(mutex_);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  // What to do with the client's next message.
  absl::Status Take() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Challenge() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Register() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Unregisters the region and ends the stream, once.
  void End(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  SharedMemory* const memory_;
  StreamSet* const set_;
  const std::string client_;
  RpcScope scope_;
  v1::RegisterMemoryRequest request_;    // of the read that is with gRPC
  v1::RegisterMemoryResponse response_;  // of the write that is with gRPC

  Mutex mutex_;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<v1::RegisterMemoryRequest> claim_ ABSL_GUARDED_BY(mutex_);  // that was challenged
  std::string challenge_ ABSL_GUARDED_BY(mutex_);
  std::string region_id_ ABSL_GUARDED_BY(mutex_);  // empty: none is registered
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_REGISTER_MEMORY_H_
