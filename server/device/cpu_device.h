// The CPU as a device: one lane over a thread pool. The embedded default, and what everything is
// tested on where there is no GPU.
#ifndef FLASHCORE_SERVER_DEVICE_CPU_DEVICE_H_
#define FLASHCORE_SERVER_DEVICE_CPU_DEVICE_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/plan.h"
#include "server/base/clock.h"
#include "server/device/device.h"

namespace flashcore::server {

class CpuDevice final : public Device {
 public:
  struct Options {
    int threads = 0;  // the lane's own included; 0: one per core this process may run on
    size_t kv_memory_bytes = size_t{256} << 20;  // taken from the system as it is used
    // A CPU keeps nothing persisting in its cache. More than 0 makes it treat so much of its K/V
    // memory as the hot segment all the same, to try placement out.
    size_t kv_hot_bytes = 0;
    kernels::Accumulate accumulate = kernels::Accumulate::kFloat32;
    bool share_prefixes = true;  // read K/V that the sequences of a launch share once for all
  };

  // UNIMPLEMENTED if there are no kernels that sum in `accumulate`; RESOURCE_EXHAUSTED if there is
  // no address space for the K/V memory.
  static absl::StatusOr<std::unique_ptr<CpuDevice>> Create(const Options& options,
                                                           const Clock* clock);

  const DeviceInfo& info() const override { return info_; }
  const std::vector<const kernels::Kernel*>& kernels() const override { return kernels_; }
  StagingPool::Allocator staging_allocator() override { return StagingPool::HeapAllocator(); }
  KvMemory kv_memory() const override {
    return {kv_memory_.get(), options_.kv_memory_bytes, options_.kv_hot_bytes};
  }
  absl::Status Start(int lane, const Launch& launch) override;  // does it all
  absl::Status Wait(int /*lane*/) override { return absl::OkStatus(); }
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
  absl::Status Attend(const Launch& launch);
  void* Workspace(size_t bytes);

  const Options options_;
  const MappedMemory kv_memory_;
  const Clock* const clock_;
  const std::vector<const kernels::Kernel*> kernels_;
  kernels::ThreadPool threads_;
  DeviceInfo info_;

  // Of the lane; kept from batch to batch.
  std::vector<kernels::Span> spans_;
  kernels::Plan plan_;
  struct Free {
    void operator()(void* memory) const;
  };
  std::unique_ptr<void, Free> workspace_;
  size_t workspace_bytes_ = 0;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_CPU_DEVICE_H_
