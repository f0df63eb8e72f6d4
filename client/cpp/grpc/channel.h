// Channels of gRPC. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_GRPC_CHANNEL_H_
#define FLASHCORE_CLIENT_CPP_GRPC_CHANNEL_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "flashcore/options.h"
#include "grpcpp/channel.h"

namespace flashcore::client {

inline constexpr int kReconnectMs = 500;  // at most, between two attempts of gRPC to connect

// Does not connect. INVALID_ARGUMENT if target or options make no sense, FAILED_PRECONDITION in a
// child of a process that has used gRPC.
absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(absl::string_view target,
                                                           ClientOptions options);

// Starts the threads that run callbacks, if they do not run.
void KeepCallbackThreads();

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_GRPC_CHANNEL_H_
