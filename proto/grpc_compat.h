// All uses of gRPC's private or removed-later interfaces, in one place.
//
// Known to hold for gRPC 1.51 (Debian 12 and Ubuntu 24.04, tested) up to 1.65: 1.66 removes
// gpr_set_log_function. With another version, read its headers and then extend the range below.
#ifndef FLASHCORE_PROTO_GRPC_COMPAT_H_
#define FLASHCORE_PROTO_GRPC_COMPAT_H_

#include <grpc/support/log.h>

#include "grpcpp/support/server_callback.h"
#include "grpcpp/version_info.h"

#if GRPC_CPP_VERSION_MAJOR != 1 || GRPC_CPP_VERSION_MINOR < 51 || GRPC_CPP_VERSION_MINOR > 65
#error "proto/grpc_compat.h holds for gRPC 1.51 to 1.65"
#endif

namespace flashcore::grpc_compat {

// A unary reactor whose OnDone and OnCancel run on the thread that completes the RPC. By default
// gRPC wakes another thread for each. They must be short and must not block.
class InlineServerUnaryReactor : public grpc::ServerUnaryReactor {
 private:
  bool InternalInlineable() final { return true; }
};

// Sends gRPC's own log messages to `sink`, from any thread.
inline void SetLogSink(void (*sink)(gpr_log_func_args* message)) { gpr_set_log_function(sink); }

}  // namespace flashcore::grpc_compat

#endif  // FLASHCORE_PROTO_GRPC_COMPAT_H_
