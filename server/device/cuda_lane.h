// One lane of a GPU: a stream, its memory, and how a launch runs on it.
#ifndef FLASHCORE_SERVER_DEVICE_CUDA_LANE_H_
#define FLASHCORE_SERVER_DEVICE_CUDA_LANE_H_

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/kernel.h"
#include "kernels/plan_cache.h"
#include "server/device/copy_queue.h"
#include "server/device/cuda_device.h"
#include "server/device/cuda_driver.h"
#include "server/device/cuda_resources.h"
#include "server/device/launch_graph.h"
#include "server/kv/launch.h"
#include "server/kv/operation.h"
#include "server/memory/block_allocator.h"

namespace flashcore::server {

// Hands out consecutive pieces of a block of host memory. Each piece has its place in a block of
// device memory of the same size. The caller owns both blocks and copies one to the other. Not
// thread-safe.
class UploadBlock {
 public:
  static constexpr size_t kAlignment = 64;  // of both blocks and of every piece, bytes

  UploadBlock() = default;
  // `bytes` is a multiple of kAlignment.
  UploadBlock(void* host, void* device, size_t bytes)
      : host_(static_cast<std::byte*>(host)),
        device_(static_cast<std::byte*>(device)),
        bytes_(bytes) {}

  // A piece on the host; null if there is no room for it.
  std::byte* Take(size_t bytes) {
    if (bytes > room()) return nullptr;
    std::byte* piece = host_ + used_;
    used_ += AlignUp(bytes, kAlignment);
    return piece;
  }
  std::byte* OnDevice(const std::byte* piece) const { return device_ + (piece - host_); }

  size_t used() const { return used_; }
  size_t room() const { return bytes_ - used_; }
  // Takes back all pieces handed out since used() returned `used`.
  void Rewind(size_t used) { used_ = used; }

 private:
  std::byte* host_ = nullptr;
  std::byte* device_ = nullptr;
  size_t bytes_ = 0;
  size_t used_ = 0;
};

// Create takes everything that launches need from the driver. Dispatch and Complete take nothing.
//
// A launch runs in passes. A pass enqueues what fits the lane's memory: inputs, page copies,
// appends, attention, results, in this order. Most launches fit one pass. Others take several, with
// a wait before each reuse of memory; their results have the same bits. Used by one thread at a
// time, whose current device is the lane's.
class CudaLane {
 public:
  // On the current device. RESOURCE_EXHAUSTED names what did not fit.
  static absl::StatusOr<std::unique_ptr<CudaLane>> Create(const CudaDevice::Options& options,
                                                          int multiprocessors);

  // Gives every stream of the lane a window (l2_window.h).
  absl::Status SetL2Window(std::byte* base, size_t bytes) const;

  // As Device::Stage; the arguments are those of Dispatch.
  absl::Status Stage(const kernels::Kernel& kernel, const std::byte* arena, const Launch& launch);

  // Enqueues `launch`. Resident K/V is in the pages that start at `arena` (device memory). After OK
  // the launch stays in place until Complete returns; after an error nothing is under way.
  // Returns early: it waits only between passes. RESOURCE_EXHAUSTED if the tensors of one
  // operation, or what one span needs, exceed the lane's memory.
  absl::Status Dispatch(const kernels::Kernel& kernel, const std::byte* arena,
                        const Launch& launch);

  // Waits for the dispatched launch, and sets its operations' times, summed over the passes.
  absl::Status Complete();

  // As Device::CopyPages. Not between Dispatch and Complete.
  absl::Status CopyPages(int64_t page_bytes, absl::Span<const kernels::PageCopy> copies);

 private:
  enum Mark { kStart, kCopied, kAttended, kDone, kMarks };

  // Blocks in device memory for an operation's tensors of the host; unused if the launch is direct.
  struct PlacedOperation {
    AttendOperation* operation;
    std::byte* inputs;
    std::byte* results;
  };

  // Operations of the launch that are not placed yet, with their appends and spans.
  struct Unplaced {
    absl::Span<AttendOperation* const> operations;
    absl::Span<const kernels::RowAppend> appends;
    absl::Span<kernels::Span> spans;
  };

  // Work that no pass has taken yet. Its tensors are placed.
  struct Pending {
    absl::Span<const kernels::PageCopy> copies;
    absl::Span<const kernels::RowAppend> appends;
    absl::Span<const kernels::Span> spans;

    bool empty() const { return copies.empty() && appends.empty() && spans.empty(); }
  };

  // The work of one pass.
  struct Pass {
    absl::Span<const kernels::PageCopy> copies;    // in device memory
    absl::Span<const kernels::RowAppend> appends;  // as AppendRowsCuda takes them
    std::vector<kernels::Span> spans;
    const kernels::Plan* plan = nullptr;  // in plans_
    std::byte* work_list = nullptr;       // in lists_, unless parameters hold it
  };

  CudaLane(const CudaDevice::Options& options, int multiprocessors);
  cudaStream_t stream() const { return stream_.get(); }
  bool IsDirect() const;

  void Begin(const kernels::Kernel& kernel, const std::byte* arena, const Launch& launch);
  absl::Status EnqueuePass();
  absl::Status EnqueueWork();   // of the pass, whose lists are there
  absl::Status CompletePass();  // adds to times_

  // Steps of a pass, in their order.
  absl::Status PlaceOperations();
  absl::Status CopyInputs();
  absl::Status PackLists();
  absl::Status UploadLists();
  absl::Status LaunchCopies(int64_t page_bytes);
  absl::Status LaunchAppends();
  absl::Status LaunchAttention();
  absl::Status CopyResults();
  absl::Status RaiseResultsReady();

  void PlaceTensors(const PlacedOperation& placed);
  void AddInputsOfPart(const PlacedOperation& placed, CopyQueue* copies) const;
  void AddResultsOfPart(const PlacedOperation& placed, CopyQueue* copies) const;
  bool EndsWithThisPart() const;
  RowBlock RowsOfPart(const kernels::Span& span, int64_t row_stride, int64_t head_stride) const;
  template <class Item>
  absl::Span<const Item> Pack(absl::Span<const Item>* items);
  absl::Span<const kernels::RowAppend> PackAppends();
  absl::Status PackSpans();
  bool TryPackSpans(absl::Span<const kernels::Span> spans);
  kernels::AttentionBatch PassBatch() const;

  absl::Status Record(Mark mark);
  absl::Status WaitForDone() const;
  absl::Status Drain();

  const CudaDevice::Options options_;
  const int multiprocessors_;
  const size_t tensor_bytes_;
  const CudaDriver* const driver_;  // null: the GPU's streams cannot write counters
  CudaStream stream_;
  kernels::Branches branches_;
  std::array<CudaEvent, kMarks> marks_;
  DeviceMemory tensors_;
  DeviceMemory workspace_;
  DeviceMemory finished_;  // int32_t[kMaxCombines], 0 between launches
  PinnedMemory pinned_lists_;
  DeviceMemory device_lists_;
  UploadBlock lists_;  // of pinned_lists_ and device_lists_; empty between passes

  // State of the launch under way. Vectors are reused, to keep their memory.
  const kernels::Kernel* kernel_ = nullptr;
  const Launch* launch_ = nullptr;
  bool is_direct_ = false;  // kernels read and write the host's tensors in place
  std::vector<kernels::Span> spans_;
  Unplaced unplaced_;
  std::vector<PlacedOperation> placed_;
  std::vector<kernels::RowAppend> placed_appends_;
  Pending pending_;
  size_t max_spans_ = 0;  // of one pass
  kernels::PlanCache plans_;
  LaunchGraph graph_;  // of the launch that is staged
  bool captures_ = false;
  bool can_stage_ = true;
  Pass pass_;
  std::vector<CUstreamBatchMemOpParams> raises_;  // of RaiseResultsReady; kept for its memory
  PhaseTimes times_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_CUDA_LANE_H_
