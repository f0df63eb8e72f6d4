// gRPC's credentials of the server's certificates, which are replaced while gRPC uses them.
//
// gRPC's own FileWatcherCertificateProvider (1.51) does not check that key and certificate belong
// together. With a pair that does not, which a reader can see in the middle of a replacement, it
// throws the old pair away and every handshake fails. Its older interface asks a callback of ours
// for the certificates before each handshake and keeps those that it has if the new ones are bad.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_TLS_CREDENTIALS_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_TLS_CREDENTIALS_H_

#include <memory>

#include "grpcpp/security/server_credentials.h"
#include "server/access/tls.h"

namespace flashcore::server {

// Credentials of one address: TLS 1.2 or 1.3 with ALPN h2. Without a client CA, clients are not
// asked for a certificate. gRPC does not keep them alive: they must outlive the server.
std::shared_ptr<grpc::ServerCredentials> MakeTlsCredentials(
    std::shared_ptr<const TlsCertificates> certificates);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_TLS_CREDENTIALS_H_
