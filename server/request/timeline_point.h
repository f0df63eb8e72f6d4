// A moment in the work of a client's CUDA stream: flashcore.v1.TimelinePoint.
#ifndef FLASHCORE_SERVER_REQUEST_TIMELINE_POINT_H_
#define FLASHCORE_SERVER_REQUEST_TIMELINE_POINT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "server/memory/shared_region.h"

namespace flashcore::server {

// When a counter in host memory that a client shares has `value`. The client's GPU or host, the
// server's GPU or host: any of them may write the counter at any time. Thread-safe.
struct TimelinePoint {
  using Counter = std::atomic<uint64_t>;
  static_assert(sizeof(Counter) == 8 && Counter::is_always_lock_free);

  std::shared_ptr<const SharedRegion> region;  // null: no point
  uint64_t offset = 0;                         // of the counter in the region
  uint64_t value = 0;

  // The rest is for a point whose place has been checked (ValidateAttend).
  Counter* counter() const { return reinterpret_cast<Counter*>(region->data() + offset); }
  static bool IsAt(uint64_t counter, uint64_t value) {
    return static_cast<int64_t>(counter - value) >= 0;
  }
  bool reached() const { return IsAt(counter()->load(std::memory_order_acquire), value); }
  // Lets it be reached. A counter that is further stays.
  void Raise() const {
    uint64_t seen = counter()->load(std::memory_order_relaxed);
    while (!IsAt(seen, value) &&
           !counter()->compare_exchange_weak(seen, value, std::memory_order_release)) {
    }
  }
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_TIMELINE_POINT_H_
