// What RPCs over gRPC begin and end with.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_UNARY_REACTOR_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_UNARY_REACTOR_H_

#include <atomic>
#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/status.h"
#include "proto/wire/grpc_compat.h"
#include "server/request/identity.h"
#include "server/transport/rpc/rpc_scope.h"
#include "server/transport/rpc/unsent_replies.h"

namespace flashcore::server {

grpc::Status ToGrpcStatus(const absl::Status& status);

// Who calls on `connection`, or why the RPC is refused at once: the server drains, the
// connection has ended (null), or the caller has no identity, too many connections, or too many
// replies that it does not read.
absl::StatusOr<Identity> AdmitCaller(RpcContext* context, const grpc::ServerContextBase& call,
                                     const ClientConnection* connection);

// Base of all unary RPCs over gRPC. Deletes itself when the RPC has ended.
class UnaryReactor : public grpc_compat::InlineServerUnaryReactor {
 public:
  UnaryReactor(RpcContext* context, RpcMetrics* rpc, grpc::ServerContextBase* call)
      : context_(context),
        call_(call),
        rpc_(context, rpc, context->client_connections->Find(call->peer())),
        reply_(&context->unsent, call, rpc_.connection()) {}

  // See AdmitCaller.
  absl::StatusOr<Identity> Admit() { return AdmitCaller(context_, *call_, rpc_.connection()); }

 protected:
  // Ends the RPC. `reply_bytes` of heap memory are charged to `client` until the reply is sent;
  // `staging` is that of the reply. Call exactly once, from any thread; `this` may be gone on
  // return.
  void End(const absl::Status& status, absl::string_view client, size_t reply_bytes,
           const StagingUse& staging = {});

 private:
  void OnDone() final;
  void OnCancel() final;
  virtual void Cancelled() {}
  virtual RequestScope& scope() = 0;
  virtual void Record() = 0;  // of the scope

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
    End(status, client, reply_bytes);
  }

 private:
  RequestScope& scope() override { return scope_; }
  void Record() override { scope_.Record(client_, ""); }

  RequestScope scope_;
  std::string client_;  // of a failed RPC
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_UNARY_REACTOR_H_
