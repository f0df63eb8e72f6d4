// A lock for work that waits for the server. Internal to the clients.
#ifndef FLASHCORE_CLIENT_LOCAL_TIMED_MUTEX_H_
#define FLASHCORE_CLIENT_LOCAL_TIMED_MUTEX_H_

#include <condition_variable>
#include <mutex>

#include "client/local/ring.h"
#include "client/local/status.h"

namespace flashcore::client::local {

// Waits until `condition` holds. False if the deadline passes first.
template <typename Condition>
bool WaitUntil(std::condition_variable* changed, std::unique_lock<std::mutex>* lock,
               SteadyTime deadline, const Condition& condition) {
  if (deadline != SteadyTime::max()) return changed->wait_until(*lock, deadline, condition);
  changed->wait(*lock, condition);
  return true;
}

// As the thread that has it may wait until its own deadline, others wait no longer than theirs.
class TimedMutex {
 public:
  // Locks, unless the deadline passes first.
  class Lock {
   public:
    Lock(TimedMutex* mutex, SteadyTime deadline) : mutex_(mutex), held_(mutex->Take(deadline)) {}
    ~Lock() {
      if (held_) mutex_->Release();
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

    // DEADLINE_EXCEEDED if it is not held.
    Status status() const { return held_ ? Status() : TooLate(); }

   private:
    TimedMutex* const mutex_;
    const bool held_;
  };

 private:
  bool Take(SteadyTime deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!WaitUntil(&released_, &lock, deadline, [this] { return !taken_; })) return false;
    return taken_ = true;
  }
  void Release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    taken_ = false;
    released_.notify_one();
  }

  std::mutex mutex_;
  std::condition_variable released_;
  bool taken_ = false;
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_LOCAL_TIMED_MUTEX_H_
