#include "server/device/cuda_prefetcher.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "kernels/kv_pages.h"
#include "server/kv/arena.h"

namespace flashcore::server {

absl::StatusOr<std::unique_ptr<CudaPrefetcher>> CudaPrefetcher::Create(size_t max_bytes) {
  const size_t max_pages = std::max(max_bytes / Arena::kUnitBytes, size_t{1});
  auto prefetcher = absl::WrapUnique(new CudaPrefetcher(max_pages));
  auto stream = MakeStream(StreamPriority::kLow);
  if (!stream.ok()) return stream.status();
  auto done = MakeEvent(cudaEventDisableTiming);
  if (!done.ok()) return done.status();
  auto places = AllocatePinned(max_pages * sizeof(int32_t), "a lane's prefetches");
  if (!places.ok()) return places.status();
  prefetcher->stream_ = *std::move(stream);
  prefetcher->done_ = *std::move(done);
  prefetcher->places_ = *std::move(places);
  return prefetcher;
}

CudaPrefetcher::~CudaPrefetcher() {
  if (stream_.get() != nullptr) cudaStreamSynchronize(stream_.get());
}

bool CudaPrefetcher::Prefetch(const std::byte* arena, int64_t page_bytes,
                              absl::Span<const int32_t> pages, cudaEvent_t after) {
  if (pages.size() > max_pages_ || cudaEventQuery(done_.get()) != cudaSuccess) return false;
  auto* const places = static_cast<int32_t*>(places_.get());
  std::copy(pages.begin(), pages.end(), places);
  return cudaStreamWaitEvent(stream_.get(), after, 0) == cudaSuccess &&
         kernels::PrefetchPagesCuda(arena, Arena::kUnitBytes, page_bytes, places,
                                    static_cast<int32_t>(pages.size()),
                                    stream_.get()) == cudaSuccess &&
         cudaEventRecord(done_.get(), stream_.get()) == cudaSuccess;
}

}  // namespace flashcore::server
