// How fast something is read.
#ifndef FLASHCORE_SERVER_KV_READ_RATE_H_
#define FLASHCORE_SERVER_KV_READ_RATE_H_

#include <algorithm>
#include <cmath>

#include "server/base/clock.h"

namespace flashcore::server {

// An exponentially decaying average: what was read kHalfLife ago counts half. A steady rate shows
// its true value after a few half-lives. A single read of n bytes shows as n * ln 2 / kHalfLife,
// about 0.07 n per second. Not thread-safe.
class ReadRate {
 public:
  static constexpr Nanoseconds kHalfLife = std::chrono::seconds(10);

  // `now` may be earlier than in a previous call, since threads read the clock before they lock the
  // mutex. It is then treated as that time.
  void Add(double bytes, TimePoint now) {
    // Adds a rate that decays from now on and whose integral is `bytes`.
    rate_ = BytesPerSecond(now) + bytes * kLn2 / Seconds(kHalfLife);
    last_ = std::max(last_, now);
  }
  double BytesPerSecond(TimePoint now) const {
    if (now <= last_) return rate_;
    return rate_ * std::exp2(-Seconds(now - last_) / Seconds(kHalfLife));
  }

 private:
  static constexpr double kLn2 = 0.693147180559945309;

  double rate_ = 0;  // bytes per second, at last_
  TimePoint last_{};
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_READ_RATE_H_
