#include "server/drain.h"

#include <malloc.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "absl/time/clock.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

// Those that WaitForStopSignal acts on.
sigset_t Signals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGXCPU}) sigaddset(&signals, signal);
  return signals;
}

// Caps the memory that KeepFreedMemory (main.cc) retains: beyond this it no longer reduces page
// faults. Large messages leave much behind, even those that gRPC rejects before the service sees
// them.
void TrimHeap() {
  constexpr size_t kMaxFreeBytes = 32 << 20;
  if (mallinfo2().fordblks >= kMaxFreeBytes) malloc_trim(0);
}

// Returns the next signal; 0: none came until `end`. Trims the heap every few seconds.
int NextSignal(absl::Time end) {
  constexpr absl::Duration kInterval = absl::Seconds(5);
  const sigset_t signals = Signals();
  while (true) {
    const absl::Duration left = std::max(end - absl::Now(), absl::ZeroDuration());
    const timespec wait = absl::ToTimespec(std::min(left, kInterval));
    const int signal = sigtimedwait(&signals, nullptr, &wait);
    if (signal > 0) return signal;
    if (left <= kInterval) return 0;
    TrimHeap();
  }
}

// Ends the process without destructors, but writes the log first.
[[noreturn]] void ExitAtOnce(int status) {
  DefaultLogger().Flush(kLogFlushTime);
  _exit(status);
}

}  // namespace

void BlockStopSignals() {
  const sigset_t signals = Signals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

int WaitForStopSignal(SignalPolicy* policy, const Clock& clock, const std::function<void()>& reload,
                      absl::Time end) {
  while (true) {
    const int signal = NextSignal(end);
    if (signal == 0) return 0;
    switch (policy->On(signal, clock.Now())) {
      case SignalPolicy::Action::kReload:
        reload();
        break;
      case SignalPolicy::Action::kNone:
        LogInfo("the first signal again: the drain goes on", {{"signal", strsignal(signal)}});
        break;
      case SignalPolicy::Action::kDrain:
      case SignalPolicy::Action::kExit:
        return signal;
    }
  }
}

void DropPendingSignals() {
  constexpr timespec kNow = {0, 0};
  const sigset_t signals = Signals();
  while (sigtimedwait(&signals, nullptr, &kNow) > 0) {
  }
}

void DrainWatch::Run() {
  constexpr absl::Duration kLookInterval = absl::Milliseconds(20);  // at end_
  SignalPolicy policy = WaitForBegin();
  // The credential files are still read every second; the server may be gone.
  const auto reload = [] { LogInfo("SIGHUP: the server drains"); };
  while (true) {
    const int signal =
        WaitForStopSignal(&policy, *SteadyClock::Get(), reload, absl::Now() + kLookInterval);
    if (signal != 0) {
      LogWarning("second signal: exiting at once", {{"signal", strsignal(signal)}});
      ExitAtOnce(128 + signal);
    }
    MutexLock lock(&mutex_);
    if (absl::Now() < end_) continue;
    LogWarning("exiting although connections are still open: they take no bytes");
    ExitAtOnce(status_);
  }
}

SignalPolicy DrainWatch::WaitForBegin() {
  MutexLock lock(&mutex_);
  while (!policy_.has_value()) begun_.Wait(&mutex_);
  return *policy_;
}

int Drain(Server* server, absl::Duration timeout, SignalPolicy policy,
          const std::atomic<bool>& device_lost, DrainWatch* watch) {
  const absl::Time end = absl::Now() + timeout;
  const absl::Duration left = std::min(timeout / 20, absl::Milliseconds(250));
  watch->Begin(policy);
  if (server->Drain(timeout)) {
    LogInfo("drained");
    // gRPC closes a connection only after the write in progress, and so does not close one whose
    // client reads nothing.
    watch->EndAt(std::max(end - left, absl::Now() + left), device_lost ? 1 : 0);
    return device_lost ? 1 : 0;
  }
  LogError("drain timed out: a launch is still running", {{"timeout", FormatDuration(timeout)}});
  ExitAtOnce(1);  // a launch cannot be interrupted, so destructors would wait for it
}

}  // namespace flashcore::server
