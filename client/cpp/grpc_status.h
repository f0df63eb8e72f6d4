// Statuses of gRPC. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_GRPC_STATUS_H_
#define FLASHCORE_CLIENT_CPP_GRPC_STATUS_H_

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace flashcore::client {

// Same code and message, with the details that the server sent. An empty message is replaced; some
// of gRPC are explained.
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_GRPC_STATUS_H_
