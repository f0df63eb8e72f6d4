// The table of attention kernels. A kernel exists if registry.cc lists it; the tests run every
// kernel that is listed.
#ifndef FLASHCORE_KERNELS_REGISTRY_H_
#define FLASHCORE_KERNELS_REGISTRY_H_

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "kernels/kernel.h"

namespace flashcore::kernels {

// A kind of CUDA device, and the least that its devices have.
struct CudaArch {
  Arch arch;
  int compute_capability;     // 10 * major + minor
  size_t block_shared_bytes;  // shared memory of a block
};

inline constexpr int kLeastComputeCapability = 80;  // cp.async and mma.sync of BF16

// The best first.
inline constexpr CudaArch kCudaArchs[] = {
    {Arch::kLargeShared, kLeastComputeCapability, 163 * 1024},
    {Arch::kSmallShared, kLeastComputeCapability, 0},
};

// The first of kCudaArchs that a device is enough for.
std::optional<Arch> ArchOf(int compute_capability, size_t block_shared_bytes);

// Every kernel of this build, in a fixed order.
const std::vector<Kernel>& AllKernels();

// The kernel with this spec; null if there is none.
const Kernel* FindKernel(const KernelSpec& asked);

// Why FindKernel(asked) found nothing: the first field whose value no kernel has together with the
// fields before it ("head_dim 80 is not one of 32, 64, 96, 128, 256").
std::string ExplainMissing(const KernelSpec& asked);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_REGISTRY_H_
