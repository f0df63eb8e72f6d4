// A thread that does something at an interval.
#ifndef FLASHCORE_SERVER_BASE_PERIODIC_THREAD_H_
#define FLASHCORE_SERVER_BASE_PERIODIC_THREAD_H_

#include <functional>
#include <memory>
#include <thread>

#include "server/base/clock.h"
#include "server/base/socket.h"

namespace flashcore::server {

class PeriodicThread {
 public:
  // Calls `call` an `interval` from now, and again that long after the start of each call, or at
  // once if the call took longer. `clock` outlives this.
  PeriodicThread(const Clock* clock, Nanoseconds interval, std::function<void()> call);

  // Waits for a call in progress.
  ~PeriodicThread();
  // Makes the next call come at once. Thread-safe.
  void CallSoon();
  PeriodicThread(const PeriodicThread&) = delete;
  PeriodicThread& operator=(const PeriodicThread&) = delete;

 private:
  void Loop();
  bool WaitForNext() const;  // false: stop

  const Clock* const clock_;
  const Nanoseconds interval_;
  const std::function<void()> call_;
  const std::unique_ptr<Timer> timer_;
  const FileDescriptor stop_;  // an eventfd
  const FileDescriptor soon_;  // another
  std::thread thread_;         // last: it uses the others
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_PERIODIC_THREAD_H_
