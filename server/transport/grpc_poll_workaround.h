// A workaround for gRPC 1.51: keeps its callback threads polling.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_POLL_WORKAROUND_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_POLL_WORKAROUND_H_

#include <string>

#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/server.h"
#include "server/base/periodic_thread.h"

namespace flashcore::server {

// A callback thread of gRPC 1.51 that has seen no event for a second sleeps for 100 ms without
// polling the network, and a request that arrives meanwhile waits for the rest of that time. This
// class makes an in-process call twice a second, which counts as an event. (An alarm does not: it
// runs on another thread.) Owns one thread.
class GrpcPollWorkaround {
 public:
  // Calls `method` ("/service/method": unary, cheap, accepts an empty message) of `server`, which
  // outlives this.
  GrpcPollWorkaround(grpc::Server* server, std::string method);

 private:
  void CallOnce();

  const std::string method_;
  grpc::GenericStub stub_;
  PeriodicThread thread_;  // last: it uses the others
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_POLL_WORKAROUND_H_
