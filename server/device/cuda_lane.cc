#include "server/device/cuda_lane.h"

#include <utility>

#include "absl/memory/memory.h"

namespace flashcore::server {

absl::StatusOr<std::unique_ptr<CudaLane>> CudaLane::Create(const Options& options) {
  auto lane = absl::WrapUnique(new CudaLane);
  for (int i = 0; i < options.slots; ++i) {
    auto slot = CudaSlot::Create(options.slot);
    if (!slot.ok()) return slot.status();
    lane->slots_.push_back(*std::move(slot));
  }
  return lane;
}

std::vector<cudaStream_t> CudaLane::streams() const {
  std::vector<cudaStream_t> streams;
  for (const auto& slot : slots_) streams.push_back(slot->stream());
  return streams;
}

absl::Status CudaLane::Start(const kernels::Kernel& kernel, const std::byte* arena,
                             const Launch& launch) {
  absl::Status status = next().Start(kernel, arena, launch);
  if (status.ok()) ++started_;
  return status;
}

absl::Status CudaLane::Wait() { return slots_[waited_++ % slots_.size()]->Wait(); }

absl::Status CudaLane::CopyPages(int64_t page_bytes, absl::Span<const kernels::PageCopy> copies) {
  return next().CopyPages(page_bytes, copies);
}

}  // namespace flashcore::server
