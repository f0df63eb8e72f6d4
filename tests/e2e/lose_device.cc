#include "tests/e2e/lose_device.h"

#include <csignal>
#include <cstdlib>
#include <thread>

namespace {

void HandleSignals(const sigset_t& signals) {
  const char* const lose = std::getenv("FLASHCORE_LOSE_GPU");
  int signal = 0;
  while (sigwait(&signals, &signal) == 0) {
    if (signal == SIGUSR1) {
      flashcore::server::testing::LoseDevice(lose == nullptr ? 0 : std::atoi(lose));
    } else {
      flashcore::server::testing::HoldDevice();
    }
  }
}

// Before main and its threads, which inherit the mask: so only this thread sees the signals. It
// leaves the others to them.
const bool waits_for_signals = [] {
  sigset_t ours;
  sigemptyset(&ours);
  sigaddset(&ours, SIGUSR1);
  sigaddset(&ours, SIGUSR2);
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::thread([ours] { HandleSignals(ours); }).detach();
  sigdelset(&all, SIGUSR1);
  sigdelset(&all, SIGUSR2);
  pthread_sigmask(SIG_UNBLOCK, &all, nullptr);
  return true;
}();

}  // namespace
