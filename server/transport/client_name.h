// Who calls.
#ifndef FLASHCORE_SERVER_TRANSPORT_CLIENT_NAME_H_
#define FLASHCORE_SERVER_TRANSPORT_CLIENT_NAME_H_

#include <string>

#include "absl/status/statusor.h"
#include "grpcpp/server_context.h"

namespace flashcore::server {

// The client as quotas and fairness know it: the address it calls from, without the port, and the
// name that it may give itself in the request metadata. INVALID_ARGUMENT if that name is too long
// or not printable. Nothing is authenticated: this guards against accidents, not against malice.
absl::StatusOr<std::string> ClientName(const grpc::ServerContextBase& context);

// Whether the client is on this host: it calls over a Unix socket.
bool IsLocal(const grpc::ServerContextBase& context);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_CLIENT_NAME_H_
