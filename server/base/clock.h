// Time as the server sees it. Tests inject their own, so none of them sleeps.
#ifndef FLASHCORE_SERVER_BASE_CLOCK_H_
#define FLASHCORE_SERVER_BASE_CLOCK_H_

#include <chrono>
#include <functional>
#include <memory>

namespace flashcore::server {

using TimePoint = std::chrono::steady_clock::time_point;
using Nanoseconds = std::chrono::nanoseconds;

inline constexpr TimePoint kNoDeadline = TimePoint::max();

// A file that becomes readable at a time, for loops that wait for files. Not thread-safe.
class Timer {
 public:
  virtual ~Timer() = default;
  virtual int fd() const = 0;
  // Readable from `time` on, until the next call; kNoDeadline: never.
  virtual void Set(TimePoint time) = 0;
};

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint Now() const = 0;
  // Must not outlive the clock.
  virtual std::unique_ptr<Timer> NewTimer() const = 0;
};

class SteadyClock final : public Clock {
 public:
  static const SteadyClock* Get();  // lives for ever

  TimePoint Now() const override { return std::chrono::steady_clock::now(); }
  std::unique_ptr<Timer> NewTimer() const override;
};

// A timer for one callback. Thread-safe.
class Alarm {
 public:
  virtual ~Alarm() = default;
  // Runs `callback` once, `delay` from now or soon after Cancel, on another thread. Never inside
  // Set or Cancel.
  virtual void Set(Nanoseconds delay, std::function<void()> callback) = 0;
  virtual void Cancel() = 0;
};
using AlarmFactory = std::unique_ptr<Alarm> (*)();

inline double Seconds(Nanoseconds duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_CLOCK_H_
