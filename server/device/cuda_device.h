// One NVIDIA GPU as a device. The header needs no CUDA; only builds with CUDA define the class.
#ifndef FLASHCORE_SERVER_DEVICE_CUDA_DEVICE_H_
#define FLASHCORE_SERVER_DEVICE_CUDA_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/device/device.h"
#include "server/kv/arena.h"

namespace flashcore::server {

class CudaLane;

// The lanes share nothing but the arena; each has a thread.
class CudaDevice final : public Device {
 public:
  enum class L2Window { kAuto, kOn, kOff };  // kAuto: if ProbeL2Window finds that it pays

  struct Options {
    int ordinal = 0;  // N of cuda:N
    kernels::Accumulate accumulate = kernels::Accumulate::kFloat32;
    bool share_prefixes = true;  // read a prefix that sequences of a launch share only once
    int lanes = 2;
    // Bytes of the arena; 0: 85% of what is free after the lanes have taken their memory, and
    // without shared_bytes.
    size_t kv_memory_bytes = 0;
    size_t shared_bytes = 0;  // that AllocateShared may be asked for, in all
    // Whether the L2 cache keeps the start of the arena, the hot segment: as many bytes as the GPU
    // allows, and at most l2_budget_bytes (0: no budget). If the GPU refuses, the device works
    // without a window, and info().l2_note says why.
    L2Window l2_window = L2Window::kAuto;
    size_t l2_budget_bytes = 0;
    size_t superblock_bytes = Arena::kDefaultSuperblockBytes;  // the hot segment is a multiple

    Nanoseconds idle_spin{0};  // DeviceInfo::idle_spin
    // If the tensors of a launch have at most this many bytes, kernels can reach them all, and read
    // each once, they are not copied: kernels read and write them in pinned memory.
    size_t direct_io_bytes = size_t{1} << 20;
    // Pinned memory for staging. It does not grow: pinning more takes milliseconds.
    size_t staging_memory_bytes = size_t{64} << 20;

    // Device memory of each lane. A launch that needs more runs in several passes.
    size_t max_request_bytes = size_t{64} << 20;  // Q, K and V of the largest request
    size_t workspace_bytes = size_t{256} << 20;   // partial results of KV splits
    size_t list_bytes = size_t{16} << 20;  // all else that kernels read; and as much pinned memory
  };

  // OK if this process can use GPU `ordinal`; NOT_FOUND says why not.
  static absl::Status Find(int ordinal);

  // Takes all memory, streams and events that launches need. NOT_FOUND as Find; UNIMPLEMENTED if
  // there are no kernels for this GPU or for `accumulate`; RESOURCE_EXHAUSTED names what did not
  // fit, and its size.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Create(const Options& options);
  ~CudaDevice() override;

  const DeviceInfo& info() const override { return info_; }
  const std::vector<const kernels::Kernel*>& kernels() const override { return kernels_; }
  StagingPool::Allocator staging_allocator() override;  // of memory that Create took
  KvMemory kv_memory() const override;
  absl::Status Stage(int lane, const Launch& launch) override;
  absl::Status Dispatch(int lane, const Launch& launch) override;
  absl::Status Complete(int lane) override;
  absl::Status CopyPages(int lane, int64_t page_bytes,
                         absl::Span<const kernels::PageCopy> copies) override;
  absl::StatusOr<SharedMemory> AllocateShared(size_t bytes) const override;
  absl::Status PinHostMemory(std::byte* data, size_t bytes, bool read_only) const override;
  void UnpinHostMemory(std::byte* data) const override;
  absl::Status ResetPersistingL2() override;

 private:
  struct Memory;  // has CUDA types

  explicit CudaDevice(const Options& options);
  absl::Status ReadInfo();
  absl::Status ReadSpeed();
  // Sets hot_bytes_, and sets as many bytes of the L2 aside: 0 if there is to be no window.
  absl::Status ChooseHotBytes();
  absl::Status TryL2Window();    // an error, unless the device is lost: why there is no window
  absl::Status ProbeL2() const;  // an error, unless the device is lost: why there is no window
  absl::Status AllocateStaging();
  absl::Status MakeLanes();
  absl::Status AllocateArena();
  absl::Status SetWindows();
  absl::Status Select() const;  // makes this GPU the calling thread's current device
  absl::Status CheckCanReachHost(bool read_only) const;

  const Options options_;
  std::vector<const kernels::Kernel*> kernels_;
  DeviceInfo info_;
  size_t hot_bytes_ = 0;
  std::unique_ptr<Memory> memory_;
  std::vector<std::unique_ptr<CudaLane>> lanes_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_CUDA_DEVICE_H_
