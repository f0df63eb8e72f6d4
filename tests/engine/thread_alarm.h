// Alarms on threads, for tests of many threads whose requests wait for staging memory.
#ifndef FLASHCORE_TESTS_ENGINE_THREAD_ALARM_H_
#define FLASHCORE_TESTS_ENGINE_THREAD_ALARM_H_

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "server/base/clock.h"

namespace flashcore::server::testing {

// Keeps real time, on a thread of its own. A callback may destroy its alarm.
class ThreadAlarm final : public Alarm {
 public:
  static std::unique_ptr<Alarm> Make() { return std::make_unique<ThreadAlarm>(); }

  void Set(Nanoseconds delay, std::function<void()> callback) override {
    ++running_;
    std::thread([state = state_, delay, callback = std::move(callback)]() mutable {
      {
        std::unique_lock<std::mutex> lock(state->mutex);
        state->changed.wait_for(lock, delay, [&] { return state->cancelled; });
      }
      callback();
      callback = nullptr;
      state.reset();
      --running_;
    }).detach();
  }
  void Cancel() override {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->cancelled = true;
    state_->changed.notify_all();
  }

  // Call it before the end of a test.
  static void WaitForAll() {
    while (running_ > 0) std::this_thread::yield();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool cancelled = false;
  };

  static inline std::atomic<int> running_{0};  // threads
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_ENGINE_THREAD_ALARM_H_
