// The explicit table of attention kernels: what exists is what is listed in registry.cc, and a
// kernel is tested by being listed there.
#ifndef FLASHCORE_KERNELS_REGISTRY_H_
#define FLASHCORE_KERNELS_REGISTRY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/plan.h"

namespace flashcore::kernels {

class ThreadPool;  // kernels/cpu/thread_pool.h

enum class Arch : uint8_t { kCpu, kSm80, kSm90 };

// What a kernel can do beyond plain dense attention.
enum Feature : uint32_t {
  kFeaturePagedKv = 1u << 0,
  kFeatureMask = 1u << 1,  // causal and sliding window
  kFeatureLse = 1u << 2,
};

// What a kernel is, or what a caller asks for.
struct KernelSpec {
  Arch arch = Arch::kCpu;
  DType dtype = DType::kFloat16;
  int32_t head_dim = 0;
  Accumulate accumulate = Accumulate::kFloat32;
  uint32_t features = 0;  // bits of Feature
  KvDType kv_dtype = KvDType::kSameAsQuery;
};

// Where a launch runs. Everything is the caller's and stays alive until the launch has completed.
struct LaunchContext {
  void* workspace = nullptr;      // at least Plan::workspace_bytes, 64-byte aligned
  ThreadPool* threads = nullptr;  // CPU kernels: the threads that share the work
  void* stream = nullptr;         // CUDA kernels: the cudaStream_t to launch on
  // CUDA kernels: the block that PackWorkList (kernels/smxx/work_list.h) made of this batch and
  // plan, its copy ordered before the launch on `stream`. The launch counts in it and leaves it as
  // it was. Block and workspace are device memory. The spans' pointers are device pointers; these
  // may also be in mapped host memory.
  void* work_list = nullptr;
};

// Runs `batch` by `plan`. CPU kernels have completed on return. Returns 0, or the cudaError_t of a
// failed launch.
using Launcher = int (*)(const AttentionBatch& batch, const Plan& plan, const LaunchContext& ctx);

struct Kernel {
  KernelSpec spec;
  Launcher launch;
  PlanOptions plan_options;  // what MakePlan needs for this kernel
};

// Every kernel of this build, in a fixed order.
const std::vector<Kernel>& AllKernels();

// The kernel that matches arch, dtype, kv_dtype, head_dim and accumulate and has at least the
// features asked for; null if there is none.
const Kernel* FindKernel(const KernelSpec& asked);

// Why FindKernel(asked) found nothing: the difference between what was asked and what there is, as
// one readable clause ("head_dim 80 is not one of 32, 64, 96, 128, 256").
std::string ExplainMissing(const KernelSpec& asked);

// "cpu", "sm80", ...; "float16", ...; "same_as_query", "float8_e4m3"; "float32", ...;
// {"paged_kv", "mask", "lse"}.
const char* Name(Arch arch);
const char* Name(DType dtype);
const char* Name(KvDType kv_dtype);
const char* Name(Accumulate accumulate);
std::vector<std::string> FeatureNames(uint32_t features);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_REGISTRY_H_
