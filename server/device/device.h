// The one virtual seam of the server: a device runs launches.
#ifndef FLASHCORE_SERVER_DEVICE_DEVICE_H_
#define FLASHCORE_SERVER_DEVICE_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/attention.h"
#include "kernels/kernel.h"
#include "server/base/clock.h"
#include "server/base/socket.h"
#include "server/kv/arena.h"
#include "server/kv/launch.h"
#include "server/memory/shared_memory.h"
#include "server/memory/shared_region.h"
#include "server/memory/staging_pool.h"

namespace flashcore::server {

// Properties of a device that an engine plans with: estimates, on the safe side.
struct DeviceSpeed {
  double flop_per_s = 1e12;   // of attention over many query rows
  double bytes_per_s = 2e12;  // of K/V, over few
  Nanoseconds request{0};     // what each request takes beside that
};

struct DeviceInfo {
  std::string id;        // "cpu", "cuda:0"
  std::string name;      // "AMD EPYC", "NVIDIA L4"
  std::string arch;      // SIMD target of a CPU, compute capability of a GPU
  std::string uuid;      // 16 bytes of a GPU; empty: none
  bool has_mps = false;  // kernels of several processes run on the GPU at the same time
  uint64_t memory_bytes = 0;
  uint64_t l2_bytes = 0;                 // 0: not known
  uint64_t l2_persisting_max_bytes = 0;  // 0: no access-policy window
  uint64_t l2_window_bytes = 0;          // each lane's window covers them: the hot segment
  uint64_t l2_persisting_bytes = 0;      // the driver has set aside for persisting lines
  std::string l2_note;                   // why a GPU has no window; else empty
  int lanes = 0;
  // How long an idle lane's thread polls for work before it sleeps. 0 where the threads that
  // compute need the core.
  Nanoseconds idle_spin{0};
  int compute_units = 0;  // threads, or streaming multiprocessors
  DeviceSpeed speed;
};

// One GPU, or the CPU. Owns the memory for resident K/V, and runs launches on its lanes.
class Device : public HostMemoryPinner {
 public:
  virtual const DeviceInfo& info() const = 0;

  // The kernels that this device can run.
  virtual const std::vector<const kernels::Kernel*>& kernels() const = 0;

  // The one of kernels() that attends `geometry`, with products of its precision or else 16-bit
  // ones; UNIMPLEMENTED if there is none.
  absl::StatusOr<const kernels::Kernel*> KernelFor(const kernels::Geometry& geometry) const;

  // The source of staging memory for this device; for one StagingPool.
  virtual StagingPool::Allocator staging_allocator() = 0;

  // Memory for resident K/V; lives as long as the device.
  virtual KvMemory kv_memory() const = 0;

  // Does what Dispatch can do before the inputs of `launch` are written. After OK, Dispatch of this
  // launch, with launch.staged set, may come next on the lane; or a call for another launch, and
  // nothing has happened. Called as Dispatch is.
  virtual absl::Status Stage(int /*lane*/, const Launch& /*launch*/) { return absl::OkStatus(); }

  // Hands `launch`, of at least one operation, to `lane`, in [0, info().lanes). The lane copies
  // pages, appends rows and attends, as far as launch.part says. Called by the one thread that
  // drives the lane, while no launch of the lane is under way. After OK `launch` is, and stays in
  // place until Complete returns. After an error no operation has a result.
  virtual absl::Status Dispatch(int lane, const Launch& launch) = 0;

  // Waits for the launch under way on `lane`, and sets its operations' times.copy_in, .kernel and
  // .copy_out. After an error no operation has a result. Called by the lane's thread.
  virtual absl::Status Complete(int lane) = 0;

  // Copies pages of one size, complete on return. Called by the lane's thread, while no launch of
  // the lane is under way.
  virtual absl::Status CopyPages(int lane, int64_t page_bytes,
                                 absl::Span<const kernels::PageCopy> copies) = 0;

  // Memory of the device that a client on this host maps, too.
  struct SharedMemory {
    std::unique_ptr<SharedRegion> region;  // unmapped when it is destroyed; for no launch by then
    FileDescriptor file;                   // for the client
  };
  // Takes at least `bytes`, zeroed. UNIMPLEMENTED if the device has no memory of its own, or cannot
  // share it; RESOURCE_EXHAUSTED. Takes milliseconds. Any thread.
  virtual absl::StatusOr<SharedMemory> AllocateShared(size_t /*bytes*/) const {
    return absl::UnimplementedError(
        absl::StrCat("device memory: ", info().id, " has none of its own to share"));
  }

  absl::Status PinHostMemory(std::byte* /*data*/, size_t /*bytes*/,
                             bool /*read_only*/) const override {
    return absl::OkStatus();
  }
  void UnpinHostMemory(std::byte* /*data*/) const override {}

  // Resets the persisting lines of the L2 cache, for when much of the hot segment has become free.
  // Lines still in use become persisting again when they are read. Any thread.
  virtual absl::Status ResetPersistingL2() { return absl::OkStatus(); }
};

// After such an error the device runs nothing more in this process.
inline constexpr char kDeviceLostPayload[] = "flashcore/device_lost";
inline void MarkDeviceLost(absl::Status* status) {
  status->SetPayload(kDeviceLostPayload, absl::Cord());
}
inline bool IsDeviceLost(const absl::Status& status) {
  return status.GetPayload(kDeviceLostPayload).has_value();
}

// The kernels of `arch` that sum in `accumulate`. UNIMPLEMENTED if there are none: the message
// names what is available.
absl::StatusOr<std::vector<const kernels::Kernel*>> ChooseKernels(kernels::Arch arch,
                                                                  kernels::Accumulate accumulate);

// The dtypes that `device` has kernels for. (No kernel sums BF16 in float16.)
std::vector<kernels::DType> SupportedDTypes(const Device& device);

// The head_dims for which `device` has kernels that read K/V stored like this, in all of its
// dtypes, ascending.
std::vector<uint32_t> SupportedHeadDims(const Device& device, kernels::KvDType kv_dtype);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_DEVICE_H_
