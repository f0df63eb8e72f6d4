// The table of attention kernels. A kernel exists if registry.cc lists it; the tests run every
// kernel that is listed.
#ifndef FLASHCORE_KERNELS_REGISTRY_H_
#define FLASHCORE_KERNELS_REGISTRY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/plan.h"
#include "kernels/tile_config.h"

namespace flashcore::kernels {

class Branches;    // kernels/smxx/branches.h
class ThreadPool;  // kernels/cpu/thread_pool.h

// Kernel family, or what it is for a kind of device.
enum class Arch : uint8_t {
  kCpu,
  kSm80,  // CUDA devices whose blocks have kLargeSharedBytes (tile_config.h): sm_80, sm_90
  kSm89,  // the same kernels in the blocks for devices that have less: sm_86, sm_89
};

// Identifies a kernel. Every kernel supports dense and paged K/V, every mask, and LSE.
struct KernelSpec {
  Arch arch = Arch::kCpu;
  DType dtype = DType::kFloat16;
  int32_t head_dim = 0;
  Accumulate accumulate = Accumulate::kFloat32;
  KvDType kv_dtype = KvDType::kSameAsQuery;
};

// Resources of a launch. The caller owns them and keeps them alive until the launch has completed.
struct LaunchContext {
  void* workspace = nullptr;      // at least Plan::workspace_bytes, 64-byte aligned
  ThreadPool* threads = nullptr;  // CPU kernels: the threads that share the work
  void* stream = nullptr;         // CUDA kernels: the cudaStream_t to launch on
  // CUDA kernels: a copy in device memory of what PackWorkList (kernels/smxx/work_list.h) made of
  // this batch and plan, ordered before the launch on `stream`; unused if
  // WorkListLayout::BytesInMemory is 0. The workspace is device memory too. The spans' pointers are
  // to device memory or to mapped host memory, but for page tables, which are read before the
  // launcher returns.
  void* work_list = nullptr;
  // CUDA kernels: the splits of each of Plan::combines that have finished, in device memory. 0
  // before the launch and after it.
  int32_t* finished = nullptr;
  // CUDA kernels: streams for kernels of one launch that run side by side, of no other launch that
  // may run at the same time.
  const Branches* branches = nullptr;
};

// Kernel::Launch of a family, for the row of the registry with this spec.
using Launcher = int (*)(const KernelSpec& spec, const AttentionBatch& batch, const Plan& plan,
                         const LaunchContext& ctx);

struct Kernel {
  // Runs `batch` as planned. A CPU kernel has completed on return. Returns 0, or the cudaError_t of
  // a failed launch.
  int Launch(const AttentionBatch& batch, const Plan& plan, const LaunchContext& ctx) const {
    return launcher(spec, batch, plan, ctx);
  }

  KernelSpec spec;
  Launcher launcher;
  PlanOptions plan_options;
};

// The family for a CUDA device whose blocks can have so much shared memory, and the shared memory
// that a CUDA family is for.
Arch ArchOf(size_t block_shared_bytes);
SharedSize SharedSizeOf(Arch arch);

// Every kernel of this build, in a fixed order.
const std::vector<Kernel>& AllKernels();

// The kernel with this spec; null if there is none.
const Kernel* FindKernel(const KernelSpec& asked);

// Why FindKernel(asked) found nothing: the first field whose value no kernel has together with the
// fields before it ("head_dim 80 is not one of 32, 64, 96, 128, 256").
std::string ExplainMissing(const KernelSpec& asked);

// "cpu", "sm80", "sm89"; "float16", "bfloat16"; "same_as_query", "float8_e4m3"; "float32",
// "float16".
const char* Name(Arch arch);
const char* Name(DType dtype);
const char* Name(KvDType kv_dtype);
const char* Name(Accumulate accumulate);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_REGISTRY_H_
