#include "tests/e2e/lose_device.h"

#include <csignal>
#include <thread>

namespace {

// Before main and its threads, which inherit the mask: so only this thread sees the signal. It
// leaves the others to them.
const bool waits_for_signal = [] {
  sigset_t lose;
  sigemptyset(&lose);
  sigaddset(&lose, SIGUSR1);
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::thread([lose] {
    int signal = 0;
    if (sigwait(&lose, &signal) == 0) flashcore::server::testing::LoseDevice();
  }).detach();
  sigdelset(&all, SIGUSR1);
  pthread_sigmask(SIG_UNBLOCK, &all, nullptr);
  return true;
}();

}  // namespace
