// Counts what is in use.
#ifndef FLASHCORE_SERVER_BASE_USE_COUNT_H_
#define FLASHCORE_SERVER_BASE_USE_COUNT_H_

#include "absl/base/thread_annotations.h"
#include "server/base/mutex.h"

namespace flashcore::server {

// An owner can wait until nothing is in use any more. Outlives the uses. Thread-safe.
class UseCount {
 public:
  class Use {
   public:
    explicit Use(UseCount* count) : count_(count) {
      MutexLock lock(&count_->mutex_);
      ++count_->uses_;
    }
    ~Use() {
      MutexLock lock(&count_->mutex_);
      if (--count_->uses_ == 0) count_->none_.NotifyAll();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    UseCount* const count_;
  };

  void WaitForNone() {
    MutexLock lock(&mutex_);
    while (uses_ > 0) none_.Wait(&mutex_);
  }

 private:
  Mutex mutex_;
  CondVar none_;
  int uses_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_USE_COUNT_H_
