#include "server/transport/attention_service.h"

#include "server/transport/convert.h"
#include "server/transport/exchange.h"
#include "server/transport/load_sequence.h"
#include "server/transport/message.h"

namespace flashcore::server {
namespace {

class AttendReactor final : public UnaryReactor, public Exchange {
 public:
  AttendReactor(const Origin& origin, grpc::CallbackServerContext* call, grpc::ByteBuffer* request,
                grpc::ByteBuffer* response)
      : UnaryReactor(origin.context, origin.rpc, call),
        Exchange(origin, request),
        response_(response) {}

  void Start(const grpc::CallbackServerContext& context) {
    operation_.deadline = ToDeadline(context.deadline(), origin_.fleet->clock());
    absl::StatusOr<Identity> caller = AdmitCaller(origin_.context, context);
    if (!caller.ok()) return Receive(caller.status());
    operation_.identity = *std::move(caller);
    bool well_formed = false;
    Receive(ParseAttend(message_, /*regions=*/nullptr, &operation_, &tensors_, &well_formed));
  }

 private:
  void Complete(const absl::Status& status) override {
    if (status.ok()) *response_ = EncodeReply(&operation_);
    const size_t bytes = status.ok() ? response_->Length() - StagedReplyBytes(operation_) : 0;
    End(status, operation_.identity.name, bytes);
  }

  void Cancelled() override { Cancel(); }
  RequestScope& scope() override { return scope_; }
  void Record() override { Exchange::Record(); }

  grpc::ByteBuffer* const response_;
};

}  // namespace

std::vector<RpcMethod> AttentionService::Methods() {
  std::vector<RpcMethod> methods =
      MethodsOf(*v1::AttendRequest::descriptor()->file()->FindServiceByName("AttentionService"));
  for (RpcMethod& method : methods) {
    method.attends = method.method == "Attend" || method.method == "AttendStream" ||
                     method.method == "LoadSequence";
  }
  return methods;
}

AttentionService::AttentionService(AttentionMethods* methods)
    : methods_(methods), fleet_(methods->fleet()), context_(methods->context()) {}

void AttentionService::Drain() {
  context_->draining = true;
  streams_.Drain();
}

template <typename Request, typename Response>
grpc::ServerUnaryReactor* AttentionService::Answer(RpcMetrics* rpc,
                                                   grpc::CallbackServerContext* call,
                                                   const Request& request, Response* response,
                                                   Method<Request, Response> method) {
  auto* reactor = new AnswerReactor(context_, rpc, call);
  const absl::StatusOr<Identity> caller = AdmitCaller(context_, *call);
  const absl::Status status =
      caller.ok() ? (methods_->*method)(*caller, request, response) : caller.status();
  // gRPC keeps the message and its serialized form.
  const size_t bytes = status.ok() ? response->ByteSizeLong() + response->SpaceUsedLong() : 0;
  reactor->Answer(status, caller.ok() ? caller->name : "", bytes);
  return reactor;
}

grpc::ServerUnaryReactor* AttentionService::Attend(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* request,
                                                   grpc::ByteBuffer* response) {
  // gRPC owns the message until the RPC ends, but allows it to be cleared earlier, which frees the
  // network's memory early.
  auto* reactor = new AttendReactor({fleet_, context_, attend_}, context,
                                    const_cast<grpc::ByteBuffer*>(request), response);
  reactor->Start(*context);
  return reactor;
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* AttentionService::AttendStream(
    grpc::CallbackServerContext* context) {
  return new AttendStreamReactor({fleet_, context_, attend_stream_}, &streams_,
                                 methods_->options().max_stream_inflight, context,
                                 ToDeadline(context->deadline(), fleet_->clock()));
}

RpcMetrics* AttentionService::Rpc(const char* method) const {
  return methods_->Rpc(method, "grpc");
}

grpc::ServerUnaryReactor* AttentionService::GetServerInfo(grpc::CallbackServerContext* context,
                                                          const v1::GetServerInfoRequest* request,
                                                          v1::GetServerInfoResponse* response) {
  return Answer(get_server_info_, context, *request, response, &AttentionMethods::GetServerInfo);
}

grpc::ServerUnaryReactor* AttentionService::CreateSequence(grpc::CallbackServerContext* context,
                                                           const v1::CreateSequenceRequest* request,
                                                           v1::CreateSequenceResponse* response) {
  return Answer(create_sequence_, context, *request, response, &AttentionMethods::CreateSequence);
}

grpc::ServerUnaryReactor* AttentionService::ForkSequence(grpc::CallbackServerContext* context,
                                                         const v1::ForkSequenceRequest* request,
                                                         v1::ForkSequenceResponse* response) {
  return Answer(fork_sequence_, context, *request, response, &AttentionMethods::ForkSequence);
}

grpc::ServerUnaryReactor* AttentionService::TruncateSequence(
    grpc::CallbackServerContext* context, const v1::TruncateSequenceRequest* request,
    v1::TruncateSequenceResponse* response) {
  return Answer(truncate_sequence_, context, *request, response,
                &AttentionMethods::TruncateSequence);
}

grpc::ServerUnaryReactor* AttentionService::DeleteSequence(grpc::CallbackServerContext* context,
                                                           const v1::DeleteSequenceRequest* request,
                                                           v1::DeleteSequenceResponse* response) {
  return Answer(delete_sequence_, context, *request, response, &AttentionMethods::DeleteSequence);
}

grpc::ServerUnaryReactor* AttentionService::GetSequence(grpc::CallbackServerContext* context,
                                                        const v1::GetSequenceRequest* request,
                                                        v1::GetSequenceResponse* response) {
  return Answer(get_sequence_, context, *request, response, &AttentionMethods::GetSequence);
}

grpc::ServerUnaryReactor* AttentionService::ListSequences(grpc::CallbackServerContext* context,
                                                          const v1::ListSequencesRequest* request,
                                                          v1::ListSequencesResponse* response) {
  return Answer(list_sequences_, context, *request, response, &AttentionMethods::ListSequences);
}

grpc::ServerReadReactor<grpc::ByteBuffer>* AttentionService::LoadSequence(
    grpc::CallbackServerContext* context, grpc::ByteBuffer* response) {
  return new LoadSequenceReactor({fleet_, context_, load_sequence_}, &streams_, context,
                                 ToDeadline(context->deadline(), fleet_->clock()), response);
}

}  // namespace flashcore::server
