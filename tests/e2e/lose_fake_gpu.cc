#include "tests/device/fake_gpu.h"
#include "tests/e2e/lose_device.h"

namespace flashcore::server::testing {

void LoseDevice() { FailFakeGpuLaunches(cudaErrorLaunchFailure); }

}  // namespace flashcore::server::testing
