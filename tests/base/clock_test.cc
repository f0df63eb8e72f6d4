#include "server/base/clock.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <chrono>
#include <optional>
#include <thread>

#include "server/base/periodic_thread.h"
#include "tests/base/fake_clock.h"

namespace flashcore::server {
namespace {

bool IsReadable(const Timer& timer, int timeout_ms) {
  pollfd file = {timer.fd(), POLLIN, 0};
  return poll(&file, 1, timeout_ms) == 1;
}

constexpr int kForever = -1;

TEST(SteadyTimerTest, IsReadableFromItsTimeUntilItIsSetAgain) {
  const auto timer = SteadyClock::Get()->NewTimer();
  EXPECT_FALSE(IsReadable(*timer, 0));
  for (const TimePoint due : {SteadyClock::Get()->Now() + std::chrono::milliseconds(1),
                              SteadyClock::Get()->Now() - std::chrono::hours(1), TimePoint()}) {
    timer->Set(due);
    EXPECT_TRUE(IsReadable(*timer, kForever));
    EXPECT_GE(SteadyClock::Get()->Now(), due);  // gate: however late, it is not early
    EXPECT_TRUE(IsReadable(*timer, 0));
    timer->Set(due);
    EXPECT_TRUE(IsReadable(*timer, kForever));
    for (const TimePoint later : {SteadyClock::Get()->Now() + std::chrono::hours(1), kNoDeadline}) {
      timer->Set(later);
      EXPECT_FALSE(IsReadable(*timer, 0));
    }
  }
}

class PeriodicThreadTest : public ::testing::Test {
 protected:
  static constexpr std::chrono::seconds kInterval{2};

  // Runs in the thread.
  void Call() {
    MutexLock lock(&mutex_);
    ++calls_;
    changed_.NotifyAll();
    while (held_) changed_.Wait(&mutex_);
    ++ended_;
  }
  void WaitForCalls(int calls) {
    MutexLock lock(&mutex_);
    while (calls_ < calls) changed_.Wait(&mutex_);
    EXPECT_EQ(calls_, calls);
  }
  void Hold(bool hold) {
    MutexLock lock(&mutex_);
    held_ = hold;
    changed_.NotifyAll();
  }
  int ended() {
    MutexLock lock(&mutex_);
    return ended_;
  }

  testing::FakeClock clock_;
  Mutex mutex_;
  CondVar changed_;
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;
  int ended_ ABSL_GUARDED_BY(mutex_) = 0;
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<PeriodicThread> thread_{std::in_place, &clock_, kInterval, [this] { Call(); }};
};

TEST_F(PeriodicThreadTest, CallsOnceAnInterval) {
  clock_.Advance(kInterval - Nanoseconds(1));
  WaitForCalls(0);
  clock_.Advance(Nanoseconds(1));
  WaitForCalls(1);
  clock_.Advance(kInterval * 5);
  WaitForCalls(2);
  clock_.Advance(kInterval);
  WaitForCalls(3);
}

// No interval is lost that passes while a call runs.
TEST_F(PeriodicThreadTest, CallsAtOnceAfterALongCall) {
  Hold(true);
  clock_.Advance(kInterval);
  WaitForCalls(1);
  clock_.Advance(kInterval);
  Hold(false);
  WaitForCalls(2);
}

TEST_F(PeriodicThreadTest, ACallThatIsWantedSoonIsOneCall) {
  for (int i = 1; i <= 200; ++i) {
    thread_->CallSoon();
    WaitForCalls(i);
  }
}

TEST_F(PeriodicThreadTest, WaitsForACallAtItsEnd) {
  Hold(true);
  clock_.Advance(kInterval);
  WaitForCalls(1);
  std::thread release([this] { Hold(false); });
  thread_.reset();
  EXPECT_EQ(ended(), 1);
  release.join();
}

}  // namespace
}  // namespace flashcore::server
