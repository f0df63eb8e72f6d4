#include "server/transport/grpc/debug_service.h"

#include <utility>

#include "server/transport/grpc/unary_reactor.h"

namespace flashcore::server {

DebugService::DebugService(size_t max_reply_bytes, int max_inflight, RpcContext* context)
    : context_(context),
      echo_(context->metrics->Rpc(v1::DebugService::service_full_name(), "Echo")),
      echo_stream_(context->metrics->Rpc(v1::DebugService::service_full_name(), "EchoStream")),
      max_inflight_(max_inflight),
      replier_(max_reply_bytes, context) {}

std::vector<RpcMethod> DebugService::Methods() {
  return MethodsOf(*v1::EchoRequest::descriptor()->file()->FindServiceByName("DebugService"));
}

grpc::ServerUnaryReactor* DebugService::Echo(grpc::CallbackServerContext* context,
                                             const grpc::ByteBuffer* request,
                                             grpc::ByteBuffer* response) {
  auto* reactor = new AnswerReactor(context_, echo_, context);
  const absl::StatusOr<Identity> client = reactor->Admit();
  absl::Status status = client.status();
  if (client.ok()) {
    // gRPC owns the message until the RPC ends, but allows it to be cleared earlier, as Attend
    // does.
    absl::StatusOr<grpc::ByteBuffer> reply = replier_.Reply(request);
    status = reply.status();
    if (reply.ok()) *response = *std::move(reply);
  }
  reactor->Answer(status, client.ok() ? client->name : "",
                  0);  // the payload is shared by all replies
  return reactor;
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* DebugService::EchoStream(
    grpc::CallbackServerContext* context) {
  return new EchoStreamReactor(&replier_, context_, echo_stream_, &streams_, max_inflight_,
                               context);
}

}  // namespace flashcore::server
