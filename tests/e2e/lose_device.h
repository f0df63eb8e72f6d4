// For servers that lose their device on purpose: lose_device.cc, linked into one, calls this when
// the process gets SIGUSR1.
#ifndef FLASHCORE_TESTS_E2E_LOSE_DEVICE_H_
#define FLASHCORE_TESTS_E2E_LOSE_DEVICE_H_

namespace flashcore::server::testing {

// From a thread of its own.
void LoseDevice();

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_E2E_LOSE_DEVICE_H_
