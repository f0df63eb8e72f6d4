// The end of the process: the signals that ask for it, and the drain.
#ifndef FLASHCORE_SERVER_DRAIN_H_
#define FLASHCORE_SERVER_DRAIN_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/base/signal_policy.h"
#include "server/transport/server.h"

namespace flashcore::server {

// How long the end of the process waits for whoever reads the log.
inline constexpr std::chrono::milliseconds kLogFlushTime(200);

// From now on only WaitForStopSignal receives the signals that it acts on. Call before the first
// thread starts, so that all inherit it.
void BlockStopSignals();

// Returns the signal that asks to drain the server, or then to exit at once; 0: none came until
// `end`. Calls `reload` at each SIGHUP before it. Trims the heap every few seconds.
int WaitForStopSignal(SignalPolicy* policy, const Clock& clock, const std::function<void()>& reload,
                      absl::Time end = absl::InfiniteFuture());

// Drops the signals that have come with the one that asks to drain, however late this runs.
void DropPendingSignals();

// Ends the process during a drain: at a second signal, or when connections are still open although
// the time is over. Owns a thread, which lasts as long as the process.
class DrainWatch {
 public:
  DrainWatch() {
    std::thread([this] { Run(); }).detach();
  }

  // From now on the watch takes the signals.
  void Begin(SignalPolicy policy) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    policy_ = policy;
    begun_.NotifyAll();
  }

  // Ends the process at `end`, with `status`.
  void EndAt(absl::Time end, int status) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    end_ = end;
    status_ = status;
  }

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  SignalPolicy WaitForBegin() ABSL_LOCKS_EXCLUDED(mutex_);

  Mutex mutex_;
  CondVar begun_;
  std::optional<SignalPolicy> policy_ ABSL_GUARDED_BY(mutex_);  // of the drain; none: not yet
  absl::Time end_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  int status_ ABSL_GUARDED_BY(mutex_) = 1;
};

// Drains `server` and returns the exit status. `watch` then ends the process if that does not end.
int Drain(Server* server, absl::Duration timeout, SignalPolicy policy,
          const std::atomic<bool>& device_lost, DrainWatch* watch);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DRAIN_H_
