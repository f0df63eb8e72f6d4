// flashcore.v1.DebugService: a bare echo, the baseline for Attend's transport cost.
#ifndef FLASHCORE_SERVER_TRANSPORT_DEBUG_SERVICE_H_
#define FLASHCORE_SERVER_TRANSPORT_DEBUG_SERVICE_H_

#include <cstddef>
#include <vector>

#include "flashcore/v1/debug.grpc.pb.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "grpcpp/support/slice.h"
#include "server/transport/rpc_scope.h"

namespace flashcore::server {

// Thread-safe.
class DebugService final
    : public v1::DebugService::WithRawCallbackMethod_Echo<v1::DebugService::Service> {
 public:
  // Replies have at most `max_reply_bytes`.
  DebugService(size_t max_reply_bytes, RpcContext* context);

  // The methods of this service, for Metrics::Options.
  static std::vector<RpcMethod> Methods();

  grpc::ServerUnaryReactor* Echo(grpc::CallbackServerContext* context,
                                 const grpc::ByteBuffer* request,
                                 grpc::ByteBuffer* response) override;

 private:
  absl::Status EchoOnce(const grpc::ByteBuffer& request, grpc::ByteBuffer* response);

  RpcContext* const context_;
  RpcMetrics* const echo_;
  const grpc::Slice reply_;  // every reply is a sub-slice of it, so replies are not copied
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_DEBUG_SERVICE_H_
