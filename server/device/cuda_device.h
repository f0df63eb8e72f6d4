// One NVIDIA GPU as a device. Only builds that have CUDA define what is declared here; the header
// needs no CUDA.
#ifndef FLASHCORE_SERVER_DEVICE_CUDA_DEVICE_H_
#define FLASHCORE_SERVER_DEVICE_CUDA_DEVICE_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/device/device.h"
#include "server/device/wait_strategy.h"
#include "server/kv/arena.h"

namespace flashcore::server {

class CudaLane;

// Its lanes are driven by a thread each and share nothing but the arena.
class CudaDevice final : public Device {
 public:
  enum class L2Window { kAuto, kOn, kOff };  // kAuto: if ProbeL2Window finds that it pays

  struct Options {
    int ordinal = 0;  // N of cuda:N
    kernels::Accumulate accumulate = kernels::Accumulate::kFloat32;
    int lanes = 2;
    // For the arena; 0: 85% of what is free once the lanes have theirs.
    size_t kv_memory_bytes = 0;
    // Whether to keep the first of it, the hot segment, in the L2 cache: as much as the GPU allows,
    // and not more than l2_budget_bytes (0: no limit of its own). A GPU that keeps nothing works
    // without, and info().l2_note says why.
    L2Window l2_window = L2Window::kAuto;
    size_t l2_budget_bytes = 0;
    size_t superblock_bytes = Arena::kDefaultSuperblockBytes;  // the hot segment has whole ones

    int slots = 2;  // of a lane: launches under way, so that copies overlap kernels
    WaitStrategy wait = WaitStrategy::kYield;
    Nanoseconds idle_spin{0};  // DeviceInfo::idle_spin
    // Tensors of a launch of at most so many bytes are not copied: kernels read and write them in
    // pinned memory.
    size_t direct_io_bytes = size_t{1} << 20;
    // Pinned memory for staging: all there will be, because to pin more takes milliseconds.
    size_t staging_memory_bytes = size_t{64} << 20;

    // Of each slot, all device memory. A launch of more runs in parts.
    size_t max_request_bytes = size_t{64} << 20;  // Q, K and V of the largest request there may be
    size_t workspace_bytes = size_t{256} << 20;   // partial results of KV splits
    size_t list_bytes = size_t{16} << 20;         // page tables and work lists; as much pinned
  };

  // OK if there is a GPU `ordinal` that the driver lets this process use; NOT_FOUND says why not.
  static absl::Status Find(int ordinal);

  // Takes all memory, streams and events that launches need. NOT_FOUND as Find; UNIMPLEMENTED if
  // there are no kernels for this GPU or for `accumulate`; RESOURCE_EXHAUSTED names what did not
  // fit, and its size.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Create(const Options& options);
  ~CudaDevice() override;

  const DeviceInfo& info() const override { return info_; }
  const std::vector<const kernels::Kernel*>& kernels() const override { return kernels_; }
  StagingPool::Allocator staging_allocator() override;  // of the memory taken by Create
  KvMemory kv_memory() const override;
  absl::Status Start(int lane, const Launch& launch) override;
  absl::Status Wait(int lane) override;
  absl::Status CopyPages(int lane, int64_t page_bytes,
                         absl::Span<const kernels::PageCopy> copies) override;
  absl::Status PinHostMemory(std::byte* data, size_t bytes, bool read_only) const override;
  void UnpinHostMemory(std::byte* data) const override;
  absl::Status ForgetHot() override;

 private:
  struct Memory;
  struct Staging;

  CudaDevice(const Options& options, std::vector<const kernels::Kernel*> kernels);
  absl::Status ReadInfo();
  // Sets hot_bytes_, and as much of the L2 aside; nothing if info_.l2_note says why.
  absl::Status ChooseHotBytes();
  absl::Status TryL2Window();    // an error that is not sticky: why there is to be no window
  absl::Status ProbeL2() const;  // likewise
  absl::Status AllocateStaging();
  absl::Status MakeLanes();
  absl::Status AllocateArena();
  absl::Status SetWindows();
  absl::Status Select() const;  // for the calling thread
  absl::Status CheckCanReachHost(bool read_only) const;

  const Options options_;
  const std::vector<const kernels::Kernel*> kernels_;
  DeviceInfo info_;
  size_t hot_bytes_ = 0;
  std::unique_ptr<Staging> staging_;
  std::unique_ptr<Memory> arena_;
  std::vector<std::unique_ptr<CudaLane>> lanes_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_CUDA_DEVICE_H_
