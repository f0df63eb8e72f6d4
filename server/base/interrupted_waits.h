// Bounds the kernel's waits that end with a signal.
#ifndef FLASHCORE_SERVER_BASE_INTERRUPTED_WAITS_H_
#define FLASHCORE_SERVER_BASE_INTERRUPTED_WAITS_H_

#include <chrono>

namespace flashcore::server {

// While it exists, the kernel's interruptible waits of this thread end after `after`: a timer
// signals the thread, then every 0.1 ms. Calls that did not wait do not notice; errno stays as it
// is. Not nested. Does nothing where the process may have no more timers (RLIMIT_SIGPENDING).
class InterruptedWaits {
 public:
  // For what usually does not wait. Longer than from one tick of the kernel to the next: then the
  // hardware's timer need not be set, which in a virtual machine takes 20 us, and not 1.
  static constexpr std::chrono::microseconds kUsual{5000};
  static constexpr std::chrono::microseconds kAtOnce{100};

  explicit InterruptedWaits(std::chrono::microseconds after = kUsual);
  ~InterruptedWaits();
  InterruptedWaits(const InterruptedWaits&) = delete;
  InterruptedWaits& operator=(const InterruptedWaits&) = delete;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_INTERRUPTED_WAITS_H_
