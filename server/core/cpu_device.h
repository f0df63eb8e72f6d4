// The CPU as a device: one lane over a thread pool. The embedded default, and what everything is
// tested on where there is no GPU.
#ifndef FLASHCORE_SERVER_CORE_CPU_DEVICE_H_
#define FLASHCORE_SERVER_CORE_CPU_DEVICE_H_

#include <memory>
#include <vector>

#include "kernels/cpu/thread_pool.h"
#include "kernels/plan.h"
#include "server/core/clock.h"
#include "server/core/device.h"

namespace flashcore::server {

class CpuDevice final : public Device {
 public:
  // `threads` includes the lane's own; 0 takes one per core that this process may run on.
  CpuDevice(int threads, const Clock* clock);

  const DeviceInfo& info() const override { return info_; }
  const std::vector<const kernels::Kernel*>& kernels() const override { return kernels_; }
  StagingPool::Allocator staging_allocator() override { return StagingPool::HeapAllocator(); }
  absl::Status Run(int lane, absl::Span<AttendOperation* const> batch) override;

 private:
  void* Workspace(size_t bytes);

  const Clock* const clock_;
  kernels::ThreadPool threads_;
  DeviceInfo info_;
  std::vector<const kernels::Kernel*> kernels_;

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

#endif  // FLASHCORE_SERVER_CORE_CPU_DEVICE_H_
