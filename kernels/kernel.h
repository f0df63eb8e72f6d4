// A kernel is a launcher, what it computes, and what it wants of a plan. registry.h lists them all.
#ifndef FLASHCORE_KERNELS_KERNEL_H_
#define FLASHCORE_KERNELS_KERNEL_H_

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/plan.h"

namespace flashcore::kernels {

class Branches;    // kernels/cuda/branches.h
class ThreadPool;  // kernels/cpu/thread_pool.h

// A kind of device: it decides which kernels there are.
enum class Arch : uint8_t {
  kCpu,
  kLargeShared,  // CUDA devices with 164 KB of shared memory an SM or more: sm_80, sm_90
  kSmallShared,  // CUDA devices with 100 KB: sm_86, sm_89
};

// Identifies a kernel. Every kernel supports dense and paged K/V, every mask, and LSE.
struct KernelSpec {
  Arch arch = Arch::kCpu;
  DType dtype = DType::kFloat16;
  int32_t head_dim = 0;
  Accumulate accumulate = Accumulate::kFloat32;
  KvDType kv_dtype = KvDType::kSameAsQuery;
  Precision precision = Precision::k16Bit;
};

// Resources of a launch of CUDA kernels beside its workspace. All memory is the device's.
struct CudaResources {
  void* stream = nullptr;  // the cudaStream_t to launch on
  // A copy of what PackWorkList (kernels/cuda/work_list.h) made of this batch and plan, ordered
  // before the launch on `stream`; unused if WorkListLayout::BytesInMemory is 0. The spans'
  // pointers are to device memory or to mapped host memory, but for page tables, which are read
  // before the launcher returns.
  void* work_list = nullptr;
  // The splits of each of Plan::combines that have finished. 0 before the launch and after it.
  int32_t* finished = nullptr;
  // Streams for kernels of one launch that run side by side, of no other launch that may run at the
  // same time.
  const Branches* branches = nullptr;
  // A family's own launch parameters, such as tensor maps, belong here.
};

// Resources of a launch. The caller owns them and keeps them alive until the launch has completed.
struct LaunchContext {
  // At least Plan::workspace_bytes, 64-byte aligned, in the memory of the device.
  void* workspace = nullptr;
  ThreadPool* threads = nullptr;  // CPU kernels: the threads that share the work
  CudaResources cuda = {};        // CUDA kernels
};

// Runs `batch` as planned. A CPU kernel has completed on return. Returns 0, or the cudaError_t of a
// failed launch.
using Launcher = int(const AttentionBatch& batch, const Plan& plan, const LaunchContext& ctx);

// A row of the registry.
struct Kernel {
  KernelSpec spec;
  Launcher* launch;
  PlanOptions plan_options;  // for MakePlan
};

// "cpu"; "sm80" for all CUDA devices with large shared memory and "sm89" for those with small, by
// the first of each; "float16", "bfloat16"; "same_as_query", "float8_e4m3", "int8"; "float32",
// "float16"; "16bit", "int8_qk", "int8_qk_pv".
inline const char* Name(Arch arch) {
  switch (arch) {
    case Arch::kCpu:
      return "cpu";
    case Arch::kLargeShared:
      return "sm80";
    case Arch::kSmallShared:
      return "sm89";
  }
  return "unknown";
}

inline const char* Name(DType dtype) { return dtype == DType::kFloat16 ? "float16" : "bfloat16"; }

inline const char* Name(KvDType kv_dtype) {
  switch (kv_dtype) {
    case KvDType::kSameAsQuery:
      return "same_as_query";
    case KvDType::kFloat8E4M3:
      return "float8_e4m3";
    case KvDType::kInt8:
      return "int8";
  }
  return "unknown";
}

inline const char* Name(Accumulate accumulate) {
  return accumulate == Accumulate::kFloat32 ? "float32" : "float16";
}

inline const char* Name(Precision precision) {
  switch (precision) {
    case Precision::k16Bit:
      return "16bit";
    case Precision::kInt8Qk:
      return "int8_qk";
    case Precision::kInt8QkPv:
      return "int8_qk_pv";
  }
  return "unknown";
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_KERNEL_H_
