// Launches the CUDA kernels of the registry on problems that live in host memory.
#ifndef FLASHCORE_TESTS_KERNELS_DEVICE_LAUNCH_H_
#define FLASHCORE_TESTS_KERNELS_DEVICE_LAUNCH_H_

#include "kernels/attention.h"
#include "kernels/kernel.h"
#include "kernels/plan.h"

namespace flashcore::kernels {

// Copies the batch to the device, launches, and copies O and LSE back. Returns what the launch
// returned.
int LaunchOnDevice(const Kernel& kernel, const AttentionBatch& batch, const Plan& plan);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_KERNELS_DEVICE_LAUNCH_H_
