// A thread that does something at an interval.
#ifndef FLASHCORE_SERVER_BASE_PERIODIC_THREAD_H_
#define FLASHCORE_SERVER_BASE_PERIODIC_THREAD_H_

#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "server/base/mutex.h"

namespace flashcore::server {

class PeriodicThread {
 public:
  // Calls `call` after `interval`, and again that long after each return.
  PeriodicThread(std::chrono::milliseconds interval, std::function<void()> call)
      : interval_(interval), call_(std::move(call)), thread_([this] { Loop(); }) {}

  // Waits for a call in progress.
  ~PeriodicThread() {
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
    }
    stop_.NotifyOne();
    thread_.join();
  }
  PeriodicThread(const PeriodicThread&) = delete;
  PeriodicThread& operator=(const PeriodicThread&) = delete;

 private:
  void Loop() {
    while (WaitForNext()) call_();
  }

  // False: stop.
  bool WaitForNext() ABSL_LOCKS_EXCLUDED(mutex_) {
    const auto next = std::chrono::steady_clock::now() + interval_;
    MutexLock lock(&mutex_);
    while (!stopping_ && stop_.WaitUntil(&mutex_, next)) {
    }
    return !stopping_;
  }

  const std::chrono::milliseconds interval_;
  const std::function<void()> call_;
  Mutex mutex_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_PERIODIC_THREAD_H_
