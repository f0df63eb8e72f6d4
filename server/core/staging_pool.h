// Staging memory: where the tensors of requests in flight live, between the network and the device.
#ifndef FLASHCORE_SERVER_CORE_STAGING_POOL_H_
#define FLASHCORE_SERVER_CORE_STAGING_POOL_H_

#include <cstddef>
#include <functional>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "server/core/mutex.h"

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

// Lends buffers of some size classes (four an octave) and keeps returned ones for reuse, because
// memory that a GPU can read is slow to get. Used and kept bytes together never exceed the limit.
// Thread-safe.
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

  StagingPool(size_t limit_bytes, Allocator allocator);
  ~StagingPool();  // waits until every buffer has come back
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;

  // RESOURCE_EXHAUSTED if the limit leaves no room for `bytes`. Zero bytes give an empty buffer.
  absl::StatusOr<StagingBuffer> Lend(size_t bytes);

  size_t limit_bytes() const { return limit_bytes_; }
  size_t used_bytes() const;  // lent
  size_t free_bytes() const;  // kept for reuse

  // The capacity of the buffer that a request for `bytes` gets.
  static size_t SizeClass(size_t bytes);

 private:
  friend class StagingBuffer;
  void Return(std::byte* data, size_t capacity);
  std::byte* Allocate(size_t capacity) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of the kept buffers. False if there is none.
  bool GiveUpLargest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t limit_bytes_;
  const Allocator allocator_;
  mutable Mutex mutex_;
  CondVar returned_;
  std::map<size_t, std::vector<std::byte*>> free_ ABSL_GUARDED_BY(mutex_);  // by capacity
  size_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t free_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_CORE_STAGING_POOL_H_
