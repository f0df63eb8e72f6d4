// Keeping the hot segment of the arena in a GPU's L2 cache. Part of the cache is set aside for
// persisting lines, and each stream's access-policy window makes the segment's lines persisting.
// Also measures at start whether such a window pays.
#ifndef FLASHCORE_SERVER_DEVICE_L2_WINDOW_H_
#define FLASHCORE_SERVER_DEVICE_L2_WINDOW_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace flashcore::server {

// The limits of a GPU. Both are 0 if its L2 has no persisting lines.
struct L2Limits {
  size_t persisting_max_bytes = 0;
  size_t window_max_bytes = 0;  // of one access-policy window
};

// Bytes of the hot segment: as many whole superblocks as `limits`, `budget_bytes` (0: no budget)
// and the arena allow. Pure.
size_t HotSegmentBytes(const L2Limits& limits, size_t budget_bytes, size_t arena_bytes,
                       size_t superblock_bytes);

// Bytes of the current device's L2 that the driver has set aside for persisting lines.
absl::StatusOr<size_t> L2SetAside();

// Sets `bytes` aside for the whole process. Returns what the driver granted, which may differ.
absl::StatusOr<size_t> SetAsideL2(size_t bytes);

// Gives `stream` its one window: [base, base + bytes) of the current device's memory. `bytes` must
// not exceed what is set aside, because the hit ratio is 1. Does not affect work captured before.
absl::Status SetL2Window(cudaStream_t stream, std::byte* base, size_t bytes);

// Resets every persisting line of the current device's L2 to normal. Lines in a window become
// persisting again when they are read.
absl::Status ResetPersistingL2();

// Median times of one read, in microseconds. Where a window changes nothing, times differ by up to
// 2.4%; where it helps, by 5.1% or more (tests/bench/notes/2026-11-25-l2-window.md).
struct L2ReadTimes {
  double with_window = 0;     // over all that is read
  double without_window = 0;  // and nothing is set aside

  bool window_gains() const { return with_window <= 0.95 * without_window; }
  bool window_loses() const { return with_window > 1.05 * without_window; }
};

// How long it takes to read hot memory again after other, cold memory was read.
struct L2Probe {
  size_t bytes = 0;       // hot
  size_t cold_bytes = 0;  // cold, read between two hot reads
  L2ReadTimes between;    // no other read runs
  L2ReadTimes beside;     // another stream reads cold memory meanwhile
  // The cold memory, alone: what is set aside may be missed also where nothing is read twice. An
  // H200 takes 16% longer, and as much for a large decode.
  L2ReadTimes cold;

  // Empty if the window pays: a read of hot memory gains and none loses. Otherwise which of them
  // object, with their times.
  std::string objection() const;
};

// Measures a window of `bytes` on the current device, whose L2 has `l2_bytes`, in less than 0.4 s.
// Needs `bytes` + 4 * l2_bytes of device memory for that time. Afterwards no line is persisting,
// and as much is set aside as before. RESOURCE_EXHAUSTED if memory is short.
absl::StatusOr<L2Probe> ProbeL2Window(size_t bytes, size_t l2_bytes);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_L2_WINDOW_H_
