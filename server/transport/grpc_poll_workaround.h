// A workaround for gRPC 1.51: keeps its callback threads polling.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_POLL_WORKAROUND_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_POLL_WORKAROUND_H_

#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/server.h"
#include "server/base/mutex.h"

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
  ~GrpcPollWorkaround();
  GrpcPollWorkaround(const GrpcPollWorkaround&) = delete;
  GrpcPollWorkaround& operator=(const GrpcPollWorkaround&) = delete;

 private:
  void Loop();
  void CallOnce();

  const std::string method_;
  grpc::GenericStub stub_;
  Mutex mutex_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_POLL_WORKAROUND_H_
