// Notices that a listener no longer accepts, or that gRPC answers nothing on it.
#ifndef FLASHCORE_SERVER_TRANSPORT_SELF_CHECK_H_
#define FLASHCORE_SERVER_TRANSPORT_SELF_CHECK_H_

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/base/clock.h"
#include "server/base/periodic_thread.h"
#include "server/transport/accept_loop.h"

namespace flashcore::server {

// Calls the health service over a connection of its own to each listener, again and again. Owns one
// thread.
class SelfCheck {
 public:
  struct Options {
    std::chrono::milliseconds interval{2000};
    std::chrono::milliseconds timeout{3000};  // of one call
    int failures = 5;                         // in a row, of one listener, until it counts as dead
    // Called after each call, on this class's thread.
    std::function<void(const std::string& address, const absl::Status& status)> on_checked;
    // Called at most once, on this class's thread.
    std::function<void(const std::string& address, const absl::Status& why)> on_dead;
  };
  // `loop` and `clock` outlive this.
  SelfCheck(Options options, AcceptLoop* loop, const Clock* clock);
  // Its destructor waits for a call in progress, at most its timeout.

 private:
  void CallAll();
  absl::Status Call(size_t listener) const;

  const Options options_;
  AcceptLoop* const loop_;
  std::vector<int> failures_;  // in a row, by listener
  bool dead_ = false;
  PeriodicThread thread_;  // last: it uses the others
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_SELF_CHECK_H_
