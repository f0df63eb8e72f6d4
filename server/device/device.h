// The one virtual seam of the server: what can run a batch.
#ifndef FLASHCORE_SERVER_DEVICE_DEVICE_H_
#define FLASHCORE_SERVER_DEVICE_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/registry.h"
#include "server/base/clock.h"
#include "server/kv/arena.h"
#include "server/kv/launch.h"
#include "server/memory/shared_memory.h"
#include "server/memory/staging_pool.h"

namespace flashcore::server {

struct DeviceInfo {
  std::string id;    // "cpu", "cuda:0"
  std::string name;  // "AMD EPYC", "NVIDIA L4"
  std::string arch;  // SIMD target of a CPU, compute capability of a GPU
  uint64_t memory_bytes = 0;
  uint64_t l2_bytes = 0;                 // 0: not known
  uint64_t l2_persisting_max_bytes = 0;  // 0: no access-policy window
  uint64_t l2_window_bytes = 0;          // of each lane, over the hot segment
  uint64_t l2_persisting_bytes = 0;      // set aside for persisting lines, as the driver says
  std::string l2_note;                   // why there is no window; empty if there is, or on a CPU
  int lanes = 0;
  int slots = 1;  // launches that one lane can have under way
  // How long a lane's thread that has nothing to do looks for work before it sleeps. 0 where the
  // threads that compute would miss the core.
  Nanoseconds idle_spin{0};
  int compute_units = 0;  // threads, or streaming multiprocessors
};

// One GPU, or the CPU: owns the memory for resident K/V, and runs launches on its lanes.
class Device : public HostMemoryPinner {
 public:
  virtual const DeviceInfo& info() const = 0;

  // The kernels that this device serves with.
  virtual const std::vector<const kernels::Kernel*>& kernels() const = 0;

  // Where staging memory for this device comes from; for one StagingPool.
  virtual StagingPool::Allocator staging_allocator() = 0;

  // For resident K/V; lives as long as the device.
  virtual KvMemory kv_memory() const = 0;

  // Starts `launch` (of at least one operation): copies pages, appends rows, attends. Called by the
  // one thread that drives `lane`, in [0, info().lanes), while fewer than info().slots launches of
  // the lane are under way. They may run at the same time. With OK the launch is under way, and
  // stays in place, until Wait has returned for it; an error means that no operation has a result.
  virtual absl::Status Start(int lane, const Launch& launch) = 0;

  // Waits for the oldest launch of `lane` that is under way, and fills in its operations'
  // times.copy_in, .kernel and .copy_out. An error means that none of them has a result. Called by
  // the thread that drives `lane`.
  virtual absl::Status Wait(int lane) = 0;

  // Copies pages of one size, complete on return. Called by the thread that drives `lane`, when it
  // could Start.
  virtual absl::Status CopyPages(int lane, int64_t page_bytes,
                                 absl::Span<const kernels::PageCopy> copies) = 0;

  absl::Status PinHostMemory(std::byte* /*data*/, size_t /*bytes*/,
                             bool /*read_only*/) const override {
    return absl::OkStatus();
  }
  void UnpinHostMemory(std::byte* /*data*/) const override {}

  // Much of the hot segment is free: what is kept persisting of it may go. What is still in use is
  // kept again as it is read. For any thread.
  virtual absl::Status ForgetHot() { return absl::OkStatus(); }
};

// The kernels of `arch` that sum in `accumulate`. UNIMPLEMENTED if there are none, saying what
// there is.
absl::StatusOr<std::vector<const kernels::Kernel*>> ChooseKernels(kernels::Arch arch,
                                                                  kernels::Accumulate accumulate);

// The dtypes that `device` has kernels of. (None sums BF16 in float16.)
std::vector<kernels::DType> SupportedDTypes(const Device& device);

// The head_dims for which `device` has kernels of each of these dtypes, ascending.
std::vector<uint32_t> SupportedHeadDims(const Device& device);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_DEVICE_H_
