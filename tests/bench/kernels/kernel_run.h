// One CUDA kernel on one shape: planned once, launched on any of several input sets.
#ifndef FLASHCORE_TESTS_BENCH_KERNELS_KERNEL_RUN_H_
#define FLASHCORE_TESTS_BENCH_KERNELS_KERNEL_RUN_H_

#include <vector>

#include "kernels/attention.h"
#include "kernels/cuda/branches.h"
#include "kernels/cuda/cuda_raii.h"
#include "kernels/kernel.h"
#include "kernels/plan.h"

namespace flashcore::kernels {

// Owns the work lists and the workspace on the current device, not the tensors.
class KernelRun {
 public:
  // Plans, and copies one work list per set to the device. A set is the spans of one launch over
  // its own device tensors. The sets have equal shapes and page tables; there is at least one.
  // cascade: whether the plan may share work items among spans with a shared prefix.
  cudaError_t Prepare(const Kernel& kernel, const Geometry& geometry,
                      std::vector<std::vector<Span>> sets, bool cascade = true);

  // Launches share the workspace, so they must be ordered.
  cudaError_t Launch(int set, cudaStream_t stream) const;

  int num_sets() const { return static_cast<int>(sets_.size()); }

 private:
  AttentionBatch Batch(int set) const;
  cudaError_t SendWorkLists();

  const Kernel* kernel_ = nullptr;
  Geometry geometry_;
  std::vector<std::vector<Span>> sets_;
  Plan plan_;
  size_t work_list_bytes_ = 0;  // of one set, rounded up to the alignment
  DeviceMemory work_lists_;
  DeviceMemory workspace_;
  DeviceMemory finished_;
  Branches branches_;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_BENCH_KERNELS_KERNEL_RUN_H_
