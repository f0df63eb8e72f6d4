// One slot of a GPU's lane: a stream, its memory, and how a launch runs on it.
#ifndef FLASHCORE_SERVER_DEVICE_CUDA_SLOT_H_
#define FLASHCORE_SERVER_DEVICE_CUDA_SLOT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/plan.h"
#include "kernels/registry.h"
#include "server/device/cuda_raii.h"
#include "server/device/upload_block.h"
#include "server/device/wait_strategy.h"
#include "server/kv/launch.h"

namespace flashcore::server {

// Everything that a launch needs of the driver is taken by Create: Start and Wait allocate nothing
// there, and make no stream and no event.
//
// A launch that fits the slot's memory is enqueued in one go. Otherwise its operations run in
// groups whose tensors fit, and the spans of a group in pieces whose page tables, work list and
// partial results fit; results are the same to the bit. One thread at a time, whose current device
// is the slot's.
class CudaSlot {
 public:
  struct Options {
    size_t tensor_bytes = 0;     // device memory: the tensors of a group
    size_t list_bytes = 0;       // pinned and device memory: what a piece reads besides tensors
    size_t workspace_bytes = 0;  // device memory: the partial results of a piece
    // Kernels read and write the tensors of a launch where they are on the host, in memory that is
    // at the same address on the device, if they are at most so many bytes in all and each is read
    // once.
    size_t direct_bytes = 0;
    int multiprocessors = 1;
    WaitStrategy wait = WaitStrategy::kYield;
  };

  // On the current device. RESOURCE_EXHAUSTED names what did not fit.
  static absl::StatusOr<std::unique_ptr<CudaSlot>> Create(const Options& options);

  cudaStream_t stream() const { return stream_.get(); }
  cudaEvent_t done() const { return marks_[kDone].get(); }  // the last of what Start enqueues

  // Enqueues `launch`, with resident K/V in the pages that start at `arena` (device memory). With
  // OK it stays in place until Wait, and nothing else is started meanwhile; an error means that
  // nothing is under way. Waits itself only for memory that a launch of several groups or pieces
  // needs again. RESOURCE_EXHAUSTED if an operation's tensors, or what one span needs, exceed the
  // slot's memory.
  absl::Status Start(const kernels::Kernel& kernel, const std::byte* arena, const Launch& launch);

  // Waits for what Start has enqueued, and fills in the times of its operations.
  absl::Status Wait();

  // As Device::CopyPages. Not between Start and Wait.
  absl::Status CopyPages(int64_t page_bytes, absl::Span<const kernels::PageCopy> copies);

 private:
  enum Mark { kStart, kCopied, kAttended, kDone, kMarks };

  // An operation of the group that runs, and the blocks of its tensors in device memory; not used
  // if the launch is direct.
  struct Placed {
    const AttendOperation* operation;
    std::byte* inputs;
    std::byte* results;
  };

  // What of a launch has not been placed yet.
  struct Remaining {
    absl::Span<AttendOperation* const> operations;
    absl::Span<const kernels::RowAppend> appends;
    absl::Span<kernels::Span> spans;
  };

  explicit CudaSlot(const Options& options) : options_(options) {}
  absl::Status Allocate();

  bool IsDirect(const kernels::Kernel& kernel, const Launch& launch) const;
  absl::Status EnqueueGroups(const kernels::Kernel& kernel, const Launch& launch);
  // Fills in group_ and appends_. Returns the group's spans, with the tensors on the device.
  absl::StatusOr<absl::Span<kernels::Span>> PlaceGroup(Remaining* remaining);
  void PlaceOne(const Placed& placed, size_t num_spans, Remaining* remaining);
  absl::Status EnqueueGroup(const kernels::Kernel& kernel, const Launch& launch,
                            absl::Span<kernels::Span> spans);
  absl::Status CopyIn();
  absl::Status CopyOut();
  absl::Status EnqueueCopies(int64_t page_bytes, absl::Span<const kernels::PageCopy> copies);
  absl::Status EnqueueAppends();
  template <class Item>
  absl::StatusOr<absl::Span<const Item>> TakeList(absl::Span<const Item>* items);

  absl::Status Attend(const kernels::Kernel& kernel, const kernels::Geometry& geometry,
                      absl::Span<const kernels::Span> spans);
  // Fills in piece_ and plan_, and returns the piece's work list; null if it does not fit.
  std::byte* PackPiece(const kernels::Kernel& kernel, const kernels::Geometry& geometry,
                       absl::Span<const kernels::Span> spans);
  bool PackPageTables();
  // So that a piece of `*count` spans, or of fewer, may fit.
  absl::Status MakeRoom(size_t* count);

  absl::Status Send();
  absl::Status Drain();
  absl::Status Record(Mark mark);
  absl::Status AwaitDone() const;
  absl::Status WaitAndAddTimes();

  const Options options_;
  CudaStream stream_;
  std::array<CudaEvent, kMarks> marks_;
  DeviceMemory tensors_;
  DeviceMemory workspace_;
  PinnedMemory pinned_lists_;
  DeviceMemory device_lists_;
  UploadBlock lists_;

  const Launch* launch_ = nullptr;  // between Start and Wait
  bool is_direct_ = false;          // of the launch that runs: no tensor is copied
  // Of the launch that runs; kept for their memory.
  std::vector<kernels::Span> spans_;
  std::vector<Placed> group_;
  std::vector<kernels::RowAppend> appends_;  // of the group, from device memory
  // Of these, in device memory: enqueued as soon as they are sent.
  absl::Span<const kernels::RowAppend> unsent_appends_;
  std::vector<kernels::Span> piece_;  // with page tables on the device
  kernels::Plan plan_;                // of the piece
  PhaseTimes times_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_CUDA_SLOT_H_
