// For servers that lose their device on purpose: lose_device.cc, linked into one, calls these from
// a thread of its own.
#ifndef FLASHCORE_TESTS_E2E_LOSE_DEVICE_H_
#define FLASHCORE_TESTS_E2E_LOSE_DEVICE_H_

namespace flashcore::server::testing {

// At SIGUSR1. `ordinal` is N of the cuda:N to lose: FLASHCORE_LOSE_GPU in the environment, default
// 0.
void LoseDevice(int ordinal);

// At SIGUSR2. A fake cuda:0 stops working, or goes on if it had stopped; logs which. A real one
// goes on.
void HoldDevice();

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_E2E_LOSE_DEVICE_H_
