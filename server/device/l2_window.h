// How the hot segment of the arena is kept in a GPU's L2 cache: part of the cache is set aside for
// persisting lines, and every stream's access-policy window makes the segment's lines persisting.
#ifndef FLASHCORE_SERVER_DEVICE_L2_WINDOW_H_
#define FLASHCORE_SERVER_DEVICE_L2_WINDOW_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace flashcore::server {

// What a GPU allows. Both are 0 if it keeps nothing persisting.
struct L2Limits {
  size_t persisting_max_bytes = 0;
  size_t window_max_bytes = 0;  // of one access-policy window
};

// Bytes of the hot segment: as many whole superblocks as `limits`, `budget_bytes` (0: no limit of
// its own) and the arena allow. Pure.
size_t HotSegmentBytes(const L2Limits& limits, size_t budget_bytes, size_t arena_bytes,
                       size_t superblock_bytes);

// Bytes of the current device's L2 that are set aside for persisting lines, as the driver says.
absl::StatusOr<size_t> L2SetAside();

// Sets `bytes` aside. Returns what was granted, which may differ. Holds for all of the process.
absl::StatusOr<size_t> SetAsideL2(size_t bytes);

// Gives `stream`, which may have one window only, the window [base, base + bytes) of the current
// device's memory. `bytes` must not exceed what was set aside, since all of it is to hit. Work that
// was captured before does not have it.
absl::Status SetL2Window(cudaStream_t stream, std::byte* base, size_t bytes);

// Makes every line of the current device's L2 one like any other. Those that a window covers become
// persisting again as they are read.
absl::Status ResetPersistingL2();

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_L2_WINDOW_H_
