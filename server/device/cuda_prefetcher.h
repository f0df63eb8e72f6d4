// Warms a GPU's L2 cache with K/V that will be read soon.
#ifndef FLASHCORE_SERVER_DEVICE_CUDA_PREFETCHER_H_
#define FLASHCORE_SERVER_DEVICE_CUDA_PREFETCHER_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/device/cuda_raii.h"

namespace flashcore::server {

// On a stream of low priority, so that new work of the lanes goes before it. One thread at a time,
// whose current device is the prefetcher's.
class CudaPrefetcher {
 public:
  // For at most `max_bytes` of pages at a time, on the current device. RESOURCE_EXHAUSTED names
  // what did not fit.
  static absl::StatusOr<std::unique_ptr<CudaPrefetcher>> Create(size_t max_bytes);
  ~CudaPrefetcher();  // waits until nothing is under way

  // Once `after` has happened, warms the cache with the pages of `page_bytes` bytes at `pages`:
  // places in `arena`, device memory, in Arena::kUnitBytes. Nothing but these places' being there
  // is asked of them: the pages may be freed or written meanwhile. False if it does not, because
  // the last is still under way, or because of an error, which later calls will tell of.
  bool Prefetch(const std::byte* arena, int64_t page_bytes, absl::Span<const int32_t> pages,
                cudaEvent_t after);

 private:
  explicit CudaPrefetcher(size_t max_pages) : max_pages_(max_pages) {}

  const size_t max_pages_;
  CudaStream stream_;
  CudaEvent done_;       // with the last
  PinnedMemory places_;  // int32_t [max_pages_], which the GPU reads there
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_CUDA_PREFETCHER_H_
