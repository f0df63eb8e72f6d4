#include "server/transport/grpc/attention_service.h"

#include <algorithm>
#include <iterator>

#include "grpcpp/support/byte_buffer.h"
#include "proto/grpc/grpc_compat.h"
#include "proto/grpc/message_view.h"
#include "server/transport/grpc/attend_stream.h"
#include "server/transport/grpc/hold_lease.h"
#include "server/transport/grpc/load_sequence.h"
#include "server/transport/grpc/unary_reactor.h"
#include "server/transport/rpc/convert.h"
#include "server/transport/rpc/exchange.h"
#include "server/transport/rpc/message.h"
#include "server/transport/rpc/unknown_fields.h"

namespace flashcore::server {
namespace {

class AttendReactor final : public UnaryReactor {
 public:
  AttendReactor(const Exchange::Origin& origin, grpc::CallbackServerContext* call,
                const grpc::ByteBuffer* message, grpc::ByteBuffer* response)
      : UnaryReactor(origin.context, origin.rpc, call),
        request_(this, origin, message),
        response_(response) {}

  void Start(TimePoint deadline) { request_.Start(deadline, Admit()); }

 private:
  class Request final : public Exchange {
   public:
    Request(AttendReactor* reactor, const Origin& origin, const grpc::ByteBuffer* message)
        : Exchange(origin, ToRequestMessage(message)), reactor_(*reactor) {}

    void Start(TimePoint deadline, absl::StatusOr<Identity> client) {
      operation_.deadline = deadline;
      if (!client.ok()) return Receive(client.status());
      operation_.identity = *std::move(client);
      const wire::MessageView message = message_.view();
      absl::Status status = CheckMessageBytes(*origin_.context, message.size());
      if (status.ok()) {
        status = ParseSingleAttend(message, /*regions=*/nullptr, &operation_, &tensors_);
      }
      Receive(status);
    }
    void End(bool sent, CutOff cut_off) {
      if (!sent) scope_.Lost(cut_off);
      Record();
    }

   private:
    void Complete(const absl::Status& status) override {
      const StagingUse staging = operation_.tensors.staged_results();
      size_t bytes = 0;
      if (status.ok()) {
        *reactor_.response_ = ToByteBuffer(EncodeReply(&operation_));
        bytes = reactor_.response_->Length() - StagedReplyBytes(operation_);
      }
      scope_.Replying(status);
      reactor_.End(status, operation_.identity.name, bytes, staging);
    }

    AttendReactor& reactor_;
  };

  void Cancelled() override { request_.Cancel(); }
  void Ended(bool sent, CutOff cut_off) override { request_.End(sent, cut_off); }

  Request request_;
  grpc::ByteBuffer* const response_;
};

// Index of a method in its service, as generated code numbers them.
int IndexOf(const char* method) {
  return AttentionMethods::Service().FindMethodByName(method)->index();
}

}  // namespace

std::vector<RpcMethod> AttentionService::Methods() {
  std::vector<RpcMethod> methods = MethodsOf(AttentionMethods::Service());
  const auto& attend = AttentionMethods::kTensorMethods;
  for (RpcMethod& method : methods) {
    method.attends = std::count(std::begin(attend), std::end(attend), method.method) > 0;
  }
  return methods;
}

AttentionService::AttentionService(AttentionMethods* methods)
    : methods_(methods), context_(methods->context()) {
  AttentionMethods::ForEach(
      [this](const char* name, AttentionMethods::Kind, auto method) { Add(name, method); });
  AddTensorMethods();
  const auto hold_lease = [this, rpc = methods_->Rpc("HoldLease", "grpc")](
                              grpc::CallbackServerContext* call, const grpc::ByteBuffer* request) {
    v1::HoldLeaseRequest message;
    absl::Status status = Parse(*request, &message);
    if (status.ok()) status = CheckKnownFields(message);
    return new HoldLeaseReactor(methods_->fleet(), &streams_, context_, rpc, call, status);
  };
  MarkMethodRawCallback(
      IndexOf("HoldLease"),
      new grpc_compat::ServerStreamHandler<grpc::ByteBuffer, v1::HoldLeaseResponse>(hold_lease));
}

template <typename Request>
absl::Status AttentionService::Parse(const grpc::ByteBuffer& message, Request* request) const {
  absl::Status status = CheckMessageBytes(*context_, message.Length());
  if (!status.ok()) return status;
  wire::ViewOf(message).Read([&](google::protobuf::io::ZeroCopyInputStream* stream) {
    if (!request->ParseFromZeroCopyStream(stream)) {
      status = absl::InvalidArgumentError("message: not well-formed protobuf");
    }
  });
  return status;
}

void AttentionService::Drain() {
  context_->draining = true;
  streams_.Drain();
}

Exchange::Origin AttentionService::OriginOf(const char* method) const {
  return {methods_->fleet(), context_, methods_->Rpc(method, "grpc")};
}

void AttentionService::AddTensorMethods() {
  using grpc::ByteBuffer;
  using grpc::CallbackServerContext;
  const auto deadline_of = [clock = &methods_->fleet()->clock()](CallbackServerContext* call) {
    return ToDeadline(call->deadline(), *clock);
  };
  const auto attend = [deadline_of, origin = OriginOf("Attend")](CallbackServerContext* call,
                                                                 const ByteBuffer* request,
                                                                 ByteBuffer* response) {
    auto* reactor = new AttendReactor(origin, call, request, response);
    reactor->Start(deadline_of(call));
    return reactor;
  };
  const auto attend_stream =
      [this, deadline_of, origin = OriginOf("AttendStream"),
       inflight = methods_->options().max_stream_inflight](CallbackServerContext* call) {
        return new AttendStreamReactor(origin, &streams_, inflight, call, deadline_of(call));
      };
  const auto load_sequence = [this, deadline_of, origin = OriginOf("LoadSequence")](
                                 CallbackServerContext* call, ByteBuffer* response) {
    return new LoadSequenceReactor(origin, &streams_, call, deadline_of(call), response);
  };
  MarkMethodRawCallback(IndexOf("Attend"),
                        new grpc_compat::UnaryHandler<ByteBuffer, ByteBuffer>(attend));
  MarkMethodRawCallback(IndexOf("AttendStream"),
                        new grpc_compat::BidiStreamHandler<ByteBuffer, ByteBuffer>(attend_stream));
  MarkMethodRawCallback(
      IndexOf("LoadSequence"),
      new grpc_compat::ClientStreamHandler<ByteBuffer, ByteBuffer>(load_sequence));
}

template <typename Request, typename Response>
void AttentionService::Add(const char* name, AttentionMethods::Method<Request, Response> method) {
  const auto answer = [this, rpc = methods_->Rpc(name, "grpc"), method](
                          grpc::CallbackServerContext* call, const grpc::ByteBuffer* request,
                          grpc::ByteBuffer* response) {
    return Answer(rpc, call, request, response, method);
  };
  MarkMethodRawCallback(IndexOf(name),
                        new grpc_compat::UnaryHandler<grpc::ByteBuffer, grpc::ByteBuffer>(answer));
}

template <typename Request, typename Response>
grpc::ServerUnaryReactor* AttentionService::Answer(
    RpcMetrics* rpc, grpc::CallbackServerContext* call, const grpc::ByteBuffer* message,
    grpc::ByteBuffer* reply, AttentionMethods::Method<Request, Response> method) {
  auto* reactor = new AnswerReactor(context_, rpc, call);
  const absl::StatusOr<Identity> client = reactor->Admit();
  absl::Status status = client.status();
  Request request;
  Response response;
  if (status.ok()) status = Parse(*message, &request);
  ReleaseMessage(message);
  if (status.ok()) status = methods_->Run(method, *client, request, &response);
  if (status.ok()) *reply = ToByteBuffer(response.SerializeAsString());
  reactor->Answer(status, client.ok() ? client->name : "", reply->Length());
  return reactor;
}

}  // namespace flashcore::server
