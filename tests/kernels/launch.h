// Launches a planned batch on the CPU or the GPU, for the kernel tests.
#ifndef FLASHCORE_TESTS_KERNELS_LAUNCH_H_
#define FLASHCORE_TESTS_KERNELS_LAUNCH_H_

#include <cmath>
#include <memory>
#include <vector>

#include "kernels/attention.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/kernel.h"
#include "kernels/plan.h"
#ifdef FLASHCORE_HAVE_CUDA
#include "tests/kernels/device_launch.h"
#endif

namespace flashcore::kernels {

// Returns what the launch returned. The workspace starts as NaN: a kernel must write before it
// reads.
inline int Launch(const Kernel& kernel, const AttentionBatch& batch, const Plan& plan,
                  ThreadPool* threads) {
#ifdef FLASHCORE_HAVE_CUDA
  if (kernel.spec.arch != Arch::kCpu) return LaunchOnDevice(kernel, batch, plan);
#endif
  constexpr size_t kAlignment = 64;
  std::vector<float> memory((plan.workspace_bytes + kAlignment) / sizeof(float), std::nanf(""));
  void* workspace = memory.data();
  size_t bytes = memory.size() * sizeof(float);
  std::align(kAlignment, plan.workspace_bytes, workspace, bytes);
  return kernel.launch(batch, plan, {workspace, threads});
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_KERNELS_LAUNCH_H_
