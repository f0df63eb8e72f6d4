// Staging memory: where the tensors of requests in flight live, between the network and the device.
#ifndef FLASHCORE_SERVER_MEMORY_STAGING_POOL_H_
#define FLASHCORE_SERVER_MEMORY_STAGING_POOL_H_

#include <cstddef>
#include <functional>
#include <list>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "server/base/mutex.h"

namespace flashcore::server {

class StagingPool;

// A piece of staging memory; goes back to its pool when destroyed. Must not outlive the pool.
class StagingBuffer {
 public:
  StagingBuffer() = default;
  StagingBuffer(StagingBuffer&& other) noexcept { *this = std::move(other); }
  StagingBuffer& operator=(StagingBuffer&& other) noexcept;
  ~StagingBuffer() { Reset(); }

  std::byte* data() const { return data_; }  // aligned to StagingPool::kAlignment; null if empty
  size_t capacity() const { return capacity_; }  // bytes; at least what was asked for
  void Reset();

 private:
  friend class StagingPool;
  StagingBuffer(StagingPool* pool, std::byte* data, size_t capacity)
      : pool_(pool), data_(data), capacity_(capacity) {}

  StagingPool* pool_ = nullptr;
  std::byte* data_ = nullptr;
  size_t capacity_ = 0;
};

// What one request asks of a pool. It gets both buffers or none, so that no request holds memory
// while it waits for more. Asks with empty buffers.
struct StagingClaim {
  size_t input_bytes = 0;
  size_t result_bytes = 0;
  StagingBuffer inputs;   // empty: not lent yet, or no bytes asked for
  StagingBuffer results;  // likewise
  // Called once if the claim has waited and got its buffers, by whichever thread returned the
  // memory and under the pool's lock: it must neither block nor use the pool.
  std::function<void()> granted;
};

// Lends buffers of some size classes (four an octave) and keeps returned ones for reuse, because
// memory that a GPU can read is slow to get. Used and kept bytes together never exceed the limit.
// When it is reached, claims wait in line. Thread-safe.
class StagingPool {
 public:
  static constexpr size_t kAlignment = 64;

  // Where memory comes from: the heap, or the pinned memory of a device. `allocate` gives memory
  // aligned to kAlignment, or null. A pool makes one call at a time.
  struct Allocator {
    std::function<void*(size_t bytes)> allocate;
    std::function<void(void*)> free;
  };
  static Allocator HeapAllocator();

  // `max_waiting_bytes`: most inputs of the claims in line; the first may have more.
  StagingPool(size_t limit_bytes, Allocator allocator, size_t max_waiting_bytes = 0);
  ~StagingPool();  // waits until every buffer has come back
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;

  // RESOURCE_EXHAUSTED if the limit leaves no room for the claim, or if others are in line.
  absl::Status Lend(StagingClaim* claim);

  // Puts the claim in line: first come, first served, however large. RESOURCE_EXHAUSTED if the line
  // is too long, or if the claim could never be granted. The claim lives until it leaves the line.
  absl::Status Wait(StagingClaim* claim);
  // To be called once after Wait returned OK. True if the claim has been granted.
  bool Leave(StagingClaim* claim);
  // RESOURCE_EXHAUSTED: what the claim needs, and what there is.
  absl::Status Full(const StagingClaim& claim) const;

  size_t limit_bytes() const { return limit_bytes_; }
  size_t used_bytes() const;  // lent
  size_t free_bytes() const;  // kept for reuse
  size_t waiting() const;     // claims in line

  // The capacity of the buffer that a request for `bytes` gets.
  static size_t SizeClass(size_t bytes);

 private:
  friend class StagingBuffer;
  void Return(std::byte* data, size_t capacity);
  bool EverFits(const StagingClaim& claim) const;
  // Both buffers, or neither and false.
  bool TryLend(StagingClaim* claim) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Grants the first claims in line, as far as memory reaches.
  void ServeLine() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status FullLocked(const StagingClaim& claim) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Null if the allocator has none. The limit leaves room for it.
  std::byte* Allocate(size_t capacity) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeBack(std::byte* data, size_t capacity) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of the kept buffers. False if there is none.
  bool GiveUpLargest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t limit_bytes_;
  const Allocator allocator_;
  const size_t max_waiting_bytes_;
  mutable Mutex mutex_;
  CondVar returned_;
  std::map<size_t, std::vector<std::byte*>> free_ ABSL_GUARDED_BY(mutex_);  // by capacity
  size_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t free_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::list<StagingClaim*> line_ ABSL_GUARDED_BY(mutex_);  // oldest first
  size_t waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;       // inputs of those in line
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_MEMORY_STAGING_POOL_H_
