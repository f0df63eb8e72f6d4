// The meaning of the process's signals.
#ifndef FLASHCORE_SERVER_BASE_SIGNAL_POLICY_H_
#define FLASHCORE_SERVER_BASE_SIGNAL_POLICY_H_

#include <chrono>
#include <csignal>
#include <optional>

#include "server/base/clock.h"

namespace flashcore::server {

// SIGHUP asks to read the credential files. Any other signal asks to stop: the first to drain, one
// more than a second after it to exit at once. But not SIGXCPU, which the kernel repeats every
// second once the process has used the CPU time of `ulimit -St`: it drains, and never more. Those
// in between are the first request again, since supervisors and terminals may signal both the
// process and its group. Not thread-safe.
class SignalPolicy {
 public:
  enum class Action { kReload, kDrain, kNone, kExit };
  static constexpr std::chrono::seconds kOneRequest{1};

  // For a signal that came at `now`.
  Action On(int signal, TimePoint now) {
    if (signal == SIGHUP) return Action::kReload;
    if (!first_stop_.has_value()) {
      first_stop_ = now;
      return Action::kDrain;
    }
    if (signal == SIGXCPU) return Action::kNone;
    return now - *first_stop_ > kOneRequest ? Action::kExit : Action::kNone;
  }

 private:
  std::optional<TimePoint> first_stop_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_SIGNAL_POLICY_H_
