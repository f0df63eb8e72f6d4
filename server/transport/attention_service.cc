#include "server/transport/attention_service.h"

#include "server/transport/convert.h"
#include "server/transport/load_sequence.h"
#include "server/transport/message.h"
#include "server/transport/tensor_receiver.h"

namespace flashcore::server {
namespace {

class AttendReactor final : public UnaryReactor {
 public:
  AttendReactor(Fleet* fleet, RpcContext* context, RpcMetrics* rpc,
                grpc::CallbackServerContext* call, grpc::ByteBuffer* request,
                grpc::ByteBuffer* response)
      : UnaryReactor(context, rpc, call),
        fleet_(fleet),
        context_(context),
        request_(request),
        response_(response),
        receiver_(fleet, rpc, request, &operation_) {}

  void Start(const grpc::CallbackServerContext& context) {
    operation_.deadline = ToDeadline(context.deadline(), fleet_->clock());
    operation_.done = [this](const absl::Status& status) { Done(status); };
    bool well_formed = false;
    absl::StatusOr<Identity> caller = AdmitCaller(context_, context);
    absl::Status status = caller.status();
    if (caller.ok()) {
      operation_.identity = *std::move(caller);
      status = ParseAttend(*request_, /*regions=*/nullptr, &operation_, &receiver_.tensors,
                           &well_formed);
    }
    receiver_.Receive(status, [this](const absl::Status& received) { Enqueue(received); });
  }

 private:
  void Enqueue(absl::Status status) {
    if (status.ok()) status = fleet_->Enqueue(&operation_);
    // Else `this` may be gone already: do not touch it.
    if (!status.ok()) End(status, operation_.identity.name, 0);
  }

  void Done(const absl::Status& status) {
    if (status.ok()) *response_ = EncodeReply(&operation_);
    const size_t bytes = status.ok() ? response_->Length() - StagedReplyBytes(operation_) : 0;
    End(status, operation_.identity.name, bytes);
  }

  void Cancelled() override { operation_.Cancel(); }
  absl::string_view request_id() const override { return operation_.request.request_id; }

  Fleet* const fleet_;
  RpcContext* const context_;
  grpc::ByteBuffer* const request_;
  grpc::ByteBuffer* const response_;
  AttendOperation operation_;
  TensorReceiver receiver_;
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
  auto* reactor = new UnaryReactor(context_, rpc, call);
  const absl::StatusOr<Identity> caller = AdmitCaller(context_, *call);
  const absl::Status status =
      caller.ok() ? (methods_->*method)(*caller, request, response) : caller.status();
  // gRPC keeps the message and its serialized form.
  const size_t bytes = status.ok() ? response->ByteSizeLong() + response->SpaceUsedLong() : 0;
  reactor->End(status, caller.ok() ? caller->name : "", bytes);
  return reactor;
}

grpc::ServerUnaryReactor* AttentionService::Attend(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* request,
                                                   grpc::ByteBuffer* response) {
  // gRPC owns the message until the RPC ends, but allows it to be cleared earlier, which frees the
  // network's memory early.
  auto* reactor = new AttendReactor(fleet_, context_, attend_, context,
                                    const_cast<grpc::ByteBuffer*>(request), response);
  reactor->Start(*context);
  return reactor;
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* AttentionService::AttendStream(
    grpc::CallbackServerContext* context) {
  return new AttendStreamReactor(fleet_, context_, attend_stream_, &streams_,
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
  return new LoadSequenceReactor(fleet_, context_, load_sequence_, &streams_, context,
                                 ToDeadline(context->deadline(), fleet_->clock()), response);
}

}  // namespace flashcore::server
