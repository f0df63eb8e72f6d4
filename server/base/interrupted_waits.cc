#include "server/base/interrupted_waits.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>

namespace flashcore::server {
namespace {

// Nobody else in the process uses it; glibc keeps the first ones for itself.
int WakeSignal() { return SIGRTMIN + 10; }

bool InstallHandler() {
  struct sigaction action = {};
  action.sa_handler = [](int) {};
  action.sa_flags = SA_RESTART;
  return sigaction(WakeSignal(), &action, nullptr) == 0;
}

// Signals the thread that makes it.
class ThreadTimer {
 public:
  ThreadTimer() {
    static const bool handled = InstallHandler();
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = WakeSignal();
    event._sigev_un._tid = gettid();
    made_ = handled && timer_create(CLOCK_MONOTONIC, &event, &timer_) == 0;
    // Whoever started the process may have blocked it.
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, WakeSignal());
    pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  }
  ~ThreadTimer() {
    if (made_) timer_delete(timer_);
  }
  ThreadTimer(const ThreadTimer&) = delete;
  ThreadTimer& operator=(const ThreadTimer&) = delete;

  // First `after`, which is less than a second, then every 0.1 ms. 0: no more.
  void Set(std::chrono::microseconds after) {
    if (!made_) return;
    const itimerspec times = {{0, 100'000}, {0, 1000 * after.count()}};
    timer_settime(timer_, 0, &times, nullptr);
  }

 private:
  timer_t timer_{};
  bool made_ = false;
};

ThreadTimer& TimerOfThread() {
  thread_local ThreadTimer timer;
  return timer;
}

}  // namespace

InterruptedWaits::InterruptedWaits(std::chrono::microseconds after) { TimerOfThread().Set(after); }

InterruptedWaits::~InterruptedWaits() {
  const int error = errno;
  TimerOfThread().Set(std::chrono::microseconds(0));
  errno = error;
}

}  // namespace flashcore::server
