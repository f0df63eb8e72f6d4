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
  if (options.prefetch_bytes > 0) {
    auto prefetcher = CudaPrefetcher::Create(options.prefetch_bytes);
    if (!prefetcher.ok()) return prefetcher.status();
    lane->prefetcher_ = *std::move(prefetcher);
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

bool CudaLane::Prefetch(const std::byte* arena, const Launch& launch) {
  if (prefetcher_ == nullptr) return false;
  const CudaSlot& newest = *slots_[(started_ - 1) % slots_.size()];
  return prefetcher_->Prefetch(arena, launch.page_layout().page_bytes(), launch.next_pages,
                               newest.done());
}

absl::Status CudaLane::CopyPages(int64_t page_bytes, absl::Span<const kernels::PageCopy> copies) {
  return next().CopyPages(page_bytes, copies);
}

}  // namespace flashcore::server
