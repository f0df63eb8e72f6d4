// One lane of a GPU: a few slots that take turns, so that copies of one launch overlap the kernels
// of another.
#ifndef FLASHCORE_SERVER_DEVICE_CUDA_LANE_H_
#define FLASHCORE_SERVER_DEVICE_CUDA_LANE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/device/cuda_slot.h"

namespace flashcore::server {

// One thread at a time, whose current device is the lane's.
class CudaLane {
 public:
  struct Options {
    int slots = 2;
    CudaSlot::Options slot;  // of each
  };

  // On the current device. RESOURCE_EXHAUSTED names what did not fit.
  static absl::StatusOr<std::unique_ptr<CudaLane>> Create(const Options& options);

  std::vector<cudaStream_t> streams() const;  // the slots'

  // As Device::Start, with resident K/V in the pages that start at `arena` (device memory).
  // RESOURCE_EXHAUSTED as CudaSlot::Start.
  absl::Status Start(const kernels::Kernel& kernel, const std::byte* arena, const Launch& launch);
  absl::Status Wait();  // as Device::Wait

  // As Device::CopyPages.
  absl::Status CopyPages(int64_t page_bytes, absl::Span<const kernels::PageCopy> copies);

 private:
  CudaLane() = default;
  CudaSlot& next() { return *slots_[started_ % slots_.size()]; }  // free

  std::vector<std::unique_ptr<CudaSlot>> slots_;  // a ring
  size_t started_ = 0;                            // launches, ever
  size_t waited_ = 0;                             // of these; at most slots_.size() fewer
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_CUDA_LANE_H_
