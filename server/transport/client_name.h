// Identifies the client of an RPC, for quotas and fairness.
#ifndef FLASHCORE_SERVER_TRANSPORT_CLIENT_NAME_H_
#define FLASHCORE_SERVER_TRANSPORT_CLIENT_NAME_H_

#include <string>

#include "absl/status/statusor.h"
#include "grpcpp/server_context.h"

namespace flashcore::server {

// The client's address without its port, then "/" and the name in the request metadata
// `flashcore-client`, if it is set. INVALID_ARGUMENT if that name is too long or not printable.
// Nothing is authenticated: this protects against accidents, not against malice.
absl::StatusOr<std::string> ClientName(const grpc::ServerContextBase& context);

// Whether the client calls over a Unix socket, and so is on this host.
bool IsLocal(const grpc::ServerContextBase& context);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_CLIENT_NAME_H_
