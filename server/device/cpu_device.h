// The CPU as a device: one lane over a thread pool. The default where there is no GPU, and for
// tests.
#ifndef FLASHCORE_SERVER_DEVICE_CPU_DEVICE_H_
#define FLASHCORE_SERVER_DEVICE_CPU_DEVICE_H_

#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/plan_cache.h"
#include "server/base/clock.h"
#include "server/device/device.h"

namespace flashcore::server {

class CpuDevice final : public Device {
 public:
  struct Options {
    int threads = 0;  // including the lane's own; 0: one per core this process may run on
    size_t kv_memory_bytes = size_t{256} << 20;  // the system provides it as it is first used
    // Bytes of K/V memory to treat as the hot segment. For tests of placement: a CPU's cache has no
    // persisting lines.
    size_t kv_hot_bytes = 0;
    kernels::Accumulate accumulate = kernels::Accumulate::kFloat32;
    bool share_prefixes = true;  // read a prefix that sequences of a launch share only once
  };

  // UNIMPLEMENTED if there are no kernels that sum in `accumulate`; RESOURCE_EXHAUSTED if there is
  // no address space for the K/V memory.
  static absl::StatusOr<std::unique_ptr<CpuDevice>> Create(const Options& options,
                                                           const Clock* clock);

  const DeviceInfo& info() const override { return info_; }
  const std::vector<const kernels::Kernel*>& kernels() const override { return kernels_; }
  StagingPool::Allocator staging_allocator() override { return StagingPool::HeapAllocator(); }
  KvMemory kv_memory() const override;
  absl::Status Dispatch(int lane, const Launch& launch) override;  // complete on return
  absl::Status Complete(int /*lane*/) override { return absl::OkStatus(); }
  absl::Status CopyPages(int lane, int64_t page_bytes,
                         absl::Span<const kernels::PageCopy> copies) override;

 private:
  struct Unmap {
    size_t bytes = 0;
    void operator()(std::byte* memory) const;
  };
  using MappedMemory = std::unique_ptr<std::byte, Unmap>;

  CpuDevice(const Options& options, std::vector<const kernels::Kernel*> kernels,
            MappedMemory kv_memory, const Clock* clock);
  absl::Status RunKernel(const Launch& launch);
  void* Workspace(size_t bytes);  // null if there is no memory

  const Options options_;
  const MappedMemory kv_memory_;
  const Clock* const clock_;
  const std::vector<const kernels::Kernel*> kernels_;
  kernels::ThreadPool threads_;
  DeviceInfo info_;

  // State of the launch under way; reused by the next.
  std::vector<kernels::Span> spans_;
  kernels::PlanCache plans_;
  std::unique_ptr<void, void (*)(void*)> workspace_{nullptr, std::free};
  size_t workspace_bytes_ = 0;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_CPU_DEVICE_H_
