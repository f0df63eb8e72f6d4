// Counts the calls that take resources from the GPU's driver.
#ifndef FLASHCORE_TESTS_DEVICE_DRIVER_CALLS_H_
#define FLASHCORE_TESTS_DEVICE_DRIVER_CALLS_H_

namespace flashcore::server::testing {

// Calls so far that take memory, streams or events from the driver or give them back. Counts calls
// of the fake GPU, or, in a program that links driver_calls.cc and has the linker wrap the
// functions there, calls of the CUDA runtime.
int DriverResourceCalls();

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_DEVICE_DRIVER_CALLS_H_
