// flashcore.v1.DebugService: bare echoes, the baselines for Attend's and AttendStream's transport
// cost.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_DEBUG_SERVICE_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_DEBUG_SERVICE_H_

#include <cstddef>
#include <vector>

#include "flashcore/v1/debug.grpc.pb.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/transport/grpc/echo.h"
#include "server/transport/grpc/stream_reactor.h"
#include "server/transport/rpc/rpc_scope.h"

namespace flashcore::server {

using DebugServiceBase = v1::DebugService::WithRawCallbackMethod_Echo<
    v1::DebugService::WithRawCallbackMethod_EchoStream<v1::DebugService::Service>>;

// Thread-safe.
class DebugService final : public DebugServiceBase {
 public:
  // Replies have at most `max_reply_bytes`; a stream has at most `max_inflight` unanswered
  // requests.
  DebugService(size_t max_reply_bytes, int max_inflight, RpcContext* context);

  // The methods of this service, for Metrics::Options.
  static std::vector<RpcMethod> Methods();

  // Ends the open streams. New ones are refused once the RpcContext says that the server drains.
  void Drain() { streams_.Drain(); }
  // Ends the streams whose identity is not valid any more.
  void EndRevoked() { streams_.EndRevoked(context_->authenticator); }

  grpc::ServerUnaryReactor* Echo(grpc::CallbackServerContext* context,
                                 const grpc::ByteBuffer* request,
                                 grpc::ByteBuffer* response) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* EchoStream(
      grpc::CallbackServerContext* context) override;

 private:
  RpcContext* const context_;
  RpcMetrics* const echo_;
  RpcMetrics* const echo_stream_;
  const int max_inflight_;
  const EchoReplier replier_;
  StreamSet streams_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_DEBUG_SERVICE_H_
