// The begin and end of every RPC over gRPC.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_UNARY_REACTOR_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_UNARY_REACTOR_H_

#include <atomic>
#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/server_context.h"
#include "proto/grpc/grpc_compat.h"
#include "server/request/identity.h"
#include "server/transport/grpc/adapters.h"
#include "server/transport/rpc/rpc_scope.h"
#include "server/transport/rpc/unsent_replies.h"

namespace flashcore::server {

// Base of all unary RPCs over gRPC. Deletes itself when the RPC has ended.
class UnaryReactor : public grpc_compat::InlineServerUnaryReactor {
 public:
  UnaryReactor(RpcContext* context, RpcMetrics* rpc, grpc::ServerContextBase* call)
      : context_(context),
        call_(call),
        rpc_(context, rpc, context->client_connections->Find(call->peer())),
        reply_(&context->unsent, CancelRpc(call, rpc_.connection())) {}

  // See AdmitClient.
  absl::StatusOr<Identity> Admit() { return AdmitClient(context_, *call_, rpc_.connection()); }

 protected:
  // Ends the RPC. `reply_bytes` of heap memory are charged to `client` until the reply is sent;
  // `staging` is that of the reply. Call exactly once, from any thread; `this` may be gone on
  // return.
  void End(const absl::Status& status, absl::string_view client, size_t reply_bytes,
           const StagingUse& staging = {}) {
    rpc_.set_status(status.code());
    reply_.Ready(client, kRpcBytes + reply_bytes, staging);
    Finish(ToGrpcStatus(status));
  }

 private:
  void OnDone() final {
    const CutOff cut_off = reply_.Sent();
    if (cancelled_) rpc_.Cancelled();
    Ended(!cancelled_, cut_off);
    delete this;
  }
  void OnCancel() final {
    cancelled_ = true;
    Cancelled();
  }
  virtual void Cancelled() {}
  // gRPC has `sent` the reply, or dropped it. The last call before this is deleted.
  virtual void Ended(bool sent, CutOff cut_off) = 0;

  RpcContext* const context_;
  grpc::ServerContextBase* const call_;
  RpcScope rpc_;
  UnsentReply reply_;
  std::atomic<bool> cancelled_{false};
};

// A unary RPC that is answered at once.
class AnswerReactor final : public UnaryReactor {
 public:
  AnswerReactor(RpcContext* context, RpcMetrics* rpc, grpc::ServerContextBase* call)
      : UnaryReactor(context, rpc, call), scope_(context, rpc) {}

  // As End.
  void Answer(const absl::Status& status, absl::string_view client, size_t reply_bytes) {
    if (!status.ok()) client_ = std::string(client);
    scope_.Replying(status);
    End(status, client, reply_bytes);
  }

 private:
  void Ended(bool sent, CutOff cut_off) override {
    if (!sent) scope_.Lost(cut_off);
    scope_.Record(client_, "");
  }

  RequestScope scope_;
  std::string client_;  // of a failed RPC
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_UNARY_REACTOR_H_
