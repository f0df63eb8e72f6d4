#include "server/transport/grpc/unary_reactor.h"

#include "server/transport/rpc/convert.h"

namespace flashcore::server {

grpc::Status ToGrpcStatus(const absl::Status& status) {
  const v1::Status message = ToStatus(status);
  // The two enumerations have the same values. gRPC sends details, unless they are empty, as
  // grpc-status-details-bin.
  return grpc::Status(static_cast<grpc::StatusCode>(message.code()), message.message(),
                      message.details().empty() ? "" : message.SerializeAsString());
}

absl::StatusOr<Identity> AdmitCaller(RpcContext* context, const grpc::ServerContextBase& call,
                                     const ClientConnection* connection) {
  if (absl::Status status = CheckNotDraining(*context); !status.ok()) return status;
  if (connection == nullptr) return absl::UnavailableError("the connection has ended");
  absl::StatusOr<Identity> caller = context->authenticator.Identify(call, connection->peer());
  if (!caller.ok()) return caller;
  absl::Status status = context->client_connections->Use(*connection, caller->name);
  if (!status.ok()) {
    context->metrics->CountRefusedConnection(RefusedConnection::kMaxConnectionsPerClient);
    return status;
  }
  status = context->unsent.Check(caller->name);
  if (!status.ok()) return status;
  return caller;
}

void UnaryReactor::End(const absl::Status& status, absl::string_view client, size_t reply_bytes,
                       const StagingUse& staging) {
  rpc_.set_status(status.code());
  scope().Replying(status);
  reply_.Ready(client, kRpcBytes + reply_bytes, staging);
  Finish(ToGrpcStatus(status));
}

void UnaryReactor::OnCancel() {
  cancelled_ = true;
  Cancelled();
}

void UnaryReactor::OnDone() {
  const CutOff cut_off = reply_.Sent();
  if (cancelled_) {
    rpc_.Cancelled();
    scope().Lost(cut_off);
  }
  Record();
  delete this;
}

}  // namespace flashcore::server
