// RegisterMemory: a region of shared memory, registered while the stream is open.
#ifndef FLASHCORE_SERVER_TRANSPORT_REGISTER_MEMORY_H_
#define FLASHCORE_SERVER_TRANSPORT_REGISTER_MEMORY_H_

#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "flashcore/v1/attention.pb.h"
#include "grpcpp/support/server_callback.h"
#include "server/memory/shared_memory.h"
#include "server/transport/stream_reactor.h"

namespace flashcore::server {

// For a server that does not allow shared memory, or a client that is not on a Unix socket.
absl::Status CannotShareMemory();

// Memory outlives it.
//
// A client may name any segment that the server can open, also one of somebody else. So it has to
// prove that it can write there before the server maps the segment. Until then the server reads
// only the first bytes, and keeps nothing open.
//
// One read or one write is with gRPC at a time: client and server take turns.
class RegisterMemoryReactor final
    : public StreamReactor<
          grpc::ServerBidiReactor<v1::RegisterMemoryRequest, v1::RegisterMemoryResponse>> {
 public:
  // `memory` is null if the client cannot share any.
  RegisterMemoryReactor(SharedMemory* memory, RpcContext* context, RpcMetrics* rpc, StreamSet* set,
                        grpc::ServerContextBase* call);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;

 private:
  // Each handles the message in request_ and fills in response_.
  absl::Status Answer() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Challenge() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Register() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Unregisters the region and ends the stream, once end_ is set.
  void Advance() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  SharedMemory* const memory_;
  v1::RegisterMemoryRequest request_;    // of the read with gRPC
  v1::RegisterMemoryResponse response_;  // of the write with gRPC

  std::optional<v1::RegisterMemoryRequest> claim_ ABSL_GUARDED_BY(mutex_);  // was challenged
  std::string challenge_ ABSL_GUARDED_BY(mutex_);
  std::string region_id_ ABSL_GUARDED_BY(mutex_);  // empty: none is registered
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_REGISTER_MEMORY_H_
