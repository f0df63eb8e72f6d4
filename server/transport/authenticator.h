// Makes the Identity of each caller.
#ifndef FLASHCORE_SERVER_TRANSPORT_AUTHENTICATOR_H_
#define FLASHCORE_SERVER_TRANSPORT_AUTHENTICATOR_H_

#include "absl/status/statusor.h"
#include "grpcpp/server_context.h"
#include "server/request/identity.h"

namespace flashcore::server {

// Thread-safe.
class Authenticator {
 public:
  // The client's address without its port, then "/" and the name in the request metadata
  // `flashcore-client`, if it is set. INVALID_ARGUMENT if that name is too long or not printable.
  // Nothing is authenticated: this protects against accidents, not against malice.
  absl::StatusOr<Identity> Identify(const grpc::ServerContextBase& context) const;
};

// Whether the client calls over a Unix socket, and so is on this host.
bool IsLocal(const grpc::ServerContextBase& context);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_AUTHENTICATOR_H_
