// A lock for work that waits for the server. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_LOCAL_TIMED_MUTEX_H_
#define FLASHCORE_CLIENT_CPP_LOCAL_TIMED_MUTEX_H_

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace flashcore::client::local {

// As the thread that has it may wait until its own deadline, others wait no longer than theirs.
class TimedMutex {
 public:
  // Locks, unless the deadline passes first.
  class Lock {
   public:
    Lock(TimedMutex* mutex, absl::Time deadline) : mutex_(mutex), held_(mutex->Take(deadline)) {}
    ~Lock() {
      if (held_) mutex_->Release();
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

    // DEADLINE_EXCEEDED if it is not held.
    absl::Status status() const {
      return held_ ? absl::OkStatus()
                   : absl::DeadlineExceededError("the deadline passed before the request was sent");
    }

   private:
    TimedMutex* const mutex_;
    const bool held_;
  };

 private:
  bool Take(absl::Time deadline) {
    absl::MutexLock lock(&mutex_);
    const absl::Condition free(
        +[](bool* taken) { return !*taken; }, &taken_);
    if (!mutex_.AwaitWithDeadline(free, deadline)) return false;
    taken_ = true;
    return true;
  }
  void Release() {
    absl::MutexLock lock(&mutex_);
    taken_ = false;
  }

  absl::Mutex mutex_;
  bool taken_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_CPP_LOCAL_TIMED_MUTEX_H_
