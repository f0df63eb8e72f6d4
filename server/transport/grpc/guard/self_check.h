// Notices that gRPC answers nothing any more.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_GUARD_SELF_CHECK_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_GUARD_SELF_CHECK_H_

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/server.h"
#include "server/base/periodic_thread.h"

namespace flashcore::server {

// Calls the health service within the process, again and again. Owns one thread.
//
// The calls are also a workaround: a callback thread of gRPC 1.51 that has seen no event for a
// second sleeps for 100 ms without polling the network, and a request that arrives meanwhile waits
// for the rest of that time. An in-process call counts as an event. (An alarm does not: it runs on
// another thread.)
class SelfCheck {
 public:
  struct Options {
    std::chrono::milliseconds interval{500};  // of the real time: gRPC sleeps by it
    std::chrono::milliseconds timeout{3000};  // of one call
    int failures = 5;                         // in a row, until gRPC counts as dead
    // Called at most once, on this class's thread.
    std::function<void(const absl::Status& why)> on_dead;
  };
  // `server` outlives this.
  SelfCheck(Options options, grpc::Server* server);
  // Waits for a call in progress, at most its timeout. Cancels those without an answer, and waits
  // until gRPC has ended them.
  ~SelfCheck();
  SelfCheck(const SelfCheck&) = delete;
  SelfCheck& operator=(const SelfCheck&) = delete;

 private:
  struct Call;
  void Check();

  const Options options_;
  grpc::GenericStub stub_;
  std::vector<std::unique_ptr<Call>> calls_;  // that have not ended, as far as is known
  int failures_ = 0;                          // in a row
  PeriodicThread thread_;                     // last: it uses the others
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_GUARD_SELF_CHECK_H_
