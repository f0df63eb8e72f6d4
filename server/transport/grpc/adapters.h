// Connects gRPC with the code that all transports share: messages, clients, alarms, cut-offs,
// certificates.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_ADAPTERS_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_ADAPTERS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/status.h"
#include "server/access/authenticator.h"
#include "server/access/client_connections.h"
#include "server/access/tls.h"
#include "server/base/clock.h"
#include "server/request/identity.h"
#include "server/transport/rpc/message.h"
#include "server/transport/rpc/rpc_scope.h"
#include "server/transport/rpc/unsent_replies.h"

namespace flashcore::server {

grpc::Status ToGrpcStatus(const absl::Status& status);

// `*message` outlives the result, which clears it. gRPC owns a message until the RPC ends, and
// hands that of a unary RPC out as const, but allows it to be cleared earlier, which frees the
// network's memory early.
RequestMessage ToRequestMessage(const grpc::ByteBuffer* message);
// Clears `*message`; after a large one, also returns the freed heap to the system.
void ReleaseMessage(const grpc::ByteBuffer* message);

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

// Credentials of one address: TLS 1.2 or 1.3 with ALPN h2. Without a client CA, clients are not
// asked for a certificate. gRPC does not keep them alive: they must outlive the server.
//
// gRPC's own FileWatcherCertificateProvider (1.51) does not check that key and certificate belong
// together. With a pair that does not, which a reader can see in the middle of a replacement, it
// throws the old pair away and every handshake fails. Its older interface asks a callback of ours
// for the certificates before each handshake and keeps those that it has if the new ones are bad.
std::shared_ptr<grpc::ServerCredentials> MakeTlsCredentials(
    std::shared_ptr<const TlsCertificates> certificates);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_ADAPTERS_H_
