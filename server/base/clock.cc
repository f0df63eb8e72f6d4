#include "server/base/clock.h"

#include <sys/timerfd.h>

#include <algorithm>

#include "server/base/socket.h"

namespace flashcore::server {
namespace {

// std::chrono::steady_clock is CLOCK_MONOTONIC on Linux.
class SteadyTimer final : public Timer {
 public:
  int fd() const override { return file_.get(); }

  void Set(TimePoint time) override {
    if (time == time_) return;  // loops set it before each wait
    time_ = time;
    itimerspec at = {};
    if (time != kNoDeadline) {
      // All zero would disarm it.
      const auto ns = std::max(time.time_since_epoch(), Nanoseconds(1)).count();
      at.it_value.tv_sec = ns / 1'000'000'000;
      at.it_value.tv_nsec = ns % 1'000'000'000;
    }
    timerfd_settime(file_.get(), TFD_TIMER_ABSTIME, &at, nullptr);
  }

 private:
  const FileDescriptor file_{timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)};
  TimePoint time_ = kNoDeadline;
};

}  // namespace

const SteadyClock* SteadyClock::Get() {
  static const SteadyClock clock;
  return &clock;
}

std::unique_ptr<Timer> SteadyClock::NewTimer() const { return std::make_unique<SteadyTimer>(); }

}  // namespace flashcore::server
