// A clock of tests.
#ifndef FLASHCORE_TESTS_BASE_FAKE_CLOCK_H_
#define FLASHCORE_TESTS_BASE_FAKE_CLOCK_H_

#include <sys/eventfd.h>

#include <memory>
#include <set>

#include "absl/base/thread_annotations.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/base/socket.h"

namespace flashcore::server::testing {

// Advances only when told to; then its timers fire whose time has come. Thread-safe.
class FakeClock final : public Clock {
 public:
  TimePoint Now() const override {
    MutexLock lock(&mutex_);
    return now_;
  }
  std::unique_ptr<server::Timer> NewTimer() const override { return std::make_unique<Timer>(this); }

  void Advance(Nanoseconds duration) {
    MutexLock lock(&mutex_);
    now_ += duration;
    for (Timer* timer : timers_) {
      if (timer->time <= now_) eventfd_write(timer->fd(), 1);
    }
  }

 private:
  struct Timer final : public server::Timer {
    explicit Timer(const FakeClock* of) : clock(of) {
      MutexLock lock(&clock->mutex_);
      clock->timers_.insert(this);
    }
    ~Timer() override {
      MutexLock lock(&clock->mutex_);
      clock->timers_.erase(this);
    }
    int fd() const override { return file.get(); }
    void Set(TimePoint value) override {
      MutexLock lock(&clock->mutex_);
      eventfd_t fired = 0;
      eventfd_read(fd(), &fired);
      time = value;
      if (time <= clock->now_) eventfd_write(fd(), 1);
    }

    const FakeClock* const clock;
    const FileDescriptor file{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    TimePoint time = kNoDeadline;  // guarded by the clock's mutex
  };

  mutable Mutex mutex_;
  TimePoint now_ ABSL_GUARDED_BY(mutex_){std::chrono::seconds(1)};
  mutable std::set<Timer*> timers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_BASE_FAKE_CLOCK_H_
