// Counts what a program asks of the GPU's driver.
#ifndef FLASHCORE_TESTS_DEVICE_DRIVER_CALLS_H_
#define FLASHCORE_TESTS_DEVICE_DRIVER_CALLS_H_

namespace flashcore::server::testing {

// Calls so far that take something from the driver or give it back: memory, streams, events. Of the
// fake GPU, or of the CUDA runtime in a program that links driver_calls.cc and has the linker wrap
// what that defines.
int DriverResourceCalls();

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_DEVICE_DRIVER_CALLS_H_
