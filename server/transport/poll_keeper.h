// Keeps gRPC's callback threads from napping.
#ifndef FLASHCORE_SERVER_TRANSPORT_POLL_KEEPER_H_
#define FLASHCORE_SERVER_TRANSPORT_POLL_KEEPER_H_

#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/server.h"
#include "server/base/mutex.h"

namespace flashcore::server {

// A thread that gRPC 1.51 runs callbacks on sleeps for 100 ms, blind to the network, once it has
// seen no event for a second; a request that comes then waits for the rest of it. A call to
// oneself, in this process, twice a second is such an event. (An alarm is none: it runs on another
// thread.)
class PollKeeper {
 public:
  // Calls `method` ("/service/method", unary, cheap, content with an empty message) of `server`,
  // which must outlive this.
  PollKeeper(grpc::Server* server, std::string method);
  ~PollKeeper();
  PollKeeper(const PollKeeper&) = delete;
  PollKeeper& operator=(const PollKeeper&) = delete;

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

#endif  // FLASHCORE_SERVER_TRANSPORT_POLL_KEEPER_H_
