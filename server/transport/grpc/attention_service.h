// flashcore.v1.AttentionService over gRPC's callback API.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_ATTENTION_SERVICE_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_ATTENTION_SERVICE_H_

#include <vector>

#include "absl/status/status.h"
#include "flashcore/v1/attention.grpc.pb.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/transport/grpc/stream_reactor.h"
#include "server/transport/rpc/attention_methods.h"
#include "server/transport/rpc/exchange.h"
#include "server/transport/rpc/rpc_scope.h"

namespace flashcore::server {

// All RPCs take raw messages: those that carry tensors, so that a tensor is copied once, from the
// network to staging memory; those of AttentionMethods, so that the size is checked before anything
// is parsed. Thread-safe. Outlives every RPC that it serves. Does not own the methods.
class AttentionService final : public v1::AttentionService::Service {
 public:
  // The methods of this service, for Metrics::Options.
  static std::vector<RpcMethod> Methods();

  explicit AttentionService(AttentionMethods* methods);

  // Refuses new requests with UNAVAILABLE. Requests in flight are answered.
  void Drain();
  // Ends the streams whose identity is not valid any more.
  void EndRevoked() { streams_.EndRevoked(context_->authenticator); }

 private:
  void AddTensorMethods();
  template <typename Request, typename Response>
  void Add(const char* name, AttentionMethods::Method<Request, Response> method);
  // RESOURCE_EXHAUSTED if the message is larger than allowed; INVALID_ARGUMENT if it is malformed.
  template <typename Request>
  absl::Status Parse(const grpc::ByteBuffer& message, Request* request) const;
  // Runs `method`, if the client is admitted.
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Answer(RpcMetrics* rpc, grpc::CallbackServerContext* call,
                                   const grpc::ByteBuffer* message, grpc::ByteBuffer* reply,
                                   AttentionMethods::Method<Request, Response> method);
  Exchange::Origin OriginOf(const char* method) const;

  AttentionMethods* const methods_;
  RpcContext* const context_;
  StreamSet streams_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_ATTENTION_SERVICE_H_
