// Connects gRPC with the code that all transports share: messages, clients, alarms, cut-offs.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_ADAPTERS_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_ADAPTERS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/status.h"
#include "server/access/authenticator.h"
#include "server/access/client_connections.h"
#include "server/base/clock.h"
#include "server/request/identity.h"
#include "server/transport/rpc/message.h"
#include "server/transport/rpc/rpc_scope.h"
#include "server/transport/rpc/unsent_replies.h"

namespace flashcore::server {

grpc::Status ToGrpcStatus(const absl::Status& status);

// `*message` outlives the result, which clears it. gRPC owns a message until the RPC ends, but
// allows it to be cleared earlier, which frees the network's memory early.
RequestMessage ToRequestMessage(grpc::ByteBuffer* message);
// Clears `*message`; after a large one, also returns the freed heap to the system.
void ReleaseMessage(grpc::ByteBuffer* message);

grpc::ByteBuffer ToByteBuffer(const std::string& message);
// Copies no staged bytes: slices point at them. Their memory goes back when gRPC drops the slices.
grpc::ByteBuffer ToByteBuffer(EncodedReply reply);

std::unique_ptr<Alarm> MakeGrpcAlarm();

// Cancels the RPC `call`. Breaks `connection`, which may be null, if the RPC then does not end:
// while the client takes no bytes from its socket, gRPC keeps the reply that it is writing. Both
// outlive the result.
UnsentReply::OnCutOff CancelRpc(grpc::ServerContextBase* call, ClientConnection* connection);

// The metadata and the certificate of a call, which outlives it.
class GrpcClaims final : public CallerClaims {
 public:
  explicit GrpcClaims(const grpc::ServerContextBase* call) : call_(*call) {}

  Values Metadata(const char* key) const override;
  std::string NameInCertificate(CertificateName kind) const override;

 private:
  const grpc::ServerContextBase& call_;
};

// Returns the client that calls on `connection`, or why the RPC is refused at once: the server
// drains, the connection has ended (null), or the client has no identity, too many connections, or
// too many replies that it does not read.
absl::StatusOr<Identity> AdmitClient(RpcContext* context, const grpc::ServerContextBase& call,
                                     const ClientConnection* connection);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_ADAPTERS_H_
