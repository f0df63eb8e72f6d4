// Staging memory: holds the tensors of requests in flight, between the network and the device.
#ifndef FLASHCORE_SERVER_MEMORY_STAGING_POOL_H_
#define FLASHCORE_SERVER_MEMORY_STAGING_POOL_H_

#include <cstddef>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"

namespace flashcore::server {

class StagingPool;

// What one client holds of a pool. The pool guards it.
struct StagingAccount {
  size_t used_bytes = 0;  // of buffers in use
  size_t waiting = 0;     // claims in the queue
};
using StagingAccounts = std::map<std::string, StagingAccount, std::less<>>;  // by client

// A piece of staging memory; returns to its pool when destroyed. The pool outlives it.
class StagingBuffer {
 public:
  StagingBuffer() = default;

  std::byte* data() const { return data_.get(); }  // aligned to StagingPool::kAlignment, or null
  size_t capacity() const { return data_ == nullptr ? 0 : data_.get_deleter().capacity; }  // bytes
  void Reset() { data_.reset(); }

 private:
  friend class StagingPool;
  struct Releaser {
    StagingPool* pool;
    StagingAccounts::iterator account;
    size_t capacity;
    void operator()(std::byte* data) const;
  };

  StagingBuffer(StagingPool* pool, StagingAccounts::iterator account, std::byte* data,
                size_t capacity)
      : data_(data, Releaser{pool, account, capacity}) {}

  std::unique_ptr<std::byte, Releaser> data_;
};

// The memory that one request needs. It gets both buffers or none: a request that waits holds no
// memory, so requests that wait cannot block each other.
struct StagingClaim {
  absl::string_view client;  // who is charged; must live as long as the claim
  size_t input_bytes = 0;
  size_t result_bytes = 0;
  StagingBuffer inputs;   // empty: not acquired, or input_bytes is 0
  StagingBuffer results;  // empty: not acquired, or result_bytes is 0
  // Called once, when the claim leaves the wait queue with its buffers, by the thread that released
  // the memory. Runs under the pool's lock: it must neither block nor call the pool.
  std::function<void()> granted;
  absl::Status refusal;  // of EndWaits; set before `granted`, which then grants nothing
};

// Hands out buffers in size classes (four per power of two) and keeps released buffers for reuse,
// because memory that a GPU can read is slow to allocate. Buffers in use and kept buffers together
// never exceed the limit. Claims that do not fit can wait in a queue. A client that holds its share
// waits for its own buffers, and holds up nobody else. Thread-safe.
class StagingPool {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kMaxWaitingOverShare = 64;  // claims of one client

  // The source of memory: the heap, or a device's pinned memory. `allocate` returns memory aligned
  // to kAlignment, or null. A pool makes one call at a time.
  struct Allocator {
    std::function<void*(size_t bytes)> allocate;
    std::function<void(void*)> free;
  };
  static Allocator HeapAllocator();

  // `max_waiting_bytes`: limit on the input_bytes of all queued claims together. The first claim in
  // the queue may exceed it. `client_bytes`: limit on the buffers in use of one client; 0: none.
  StagingPool(size_t limit_bytes, Allocator allocator, size_t max_waiting_bytes = 0,
              size_t client_bytes = 0);
  ~StagingPool();  // waits until every buffer is released
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;

  // Fills the claim's buffers. RESOURCE_EXHAUSTED if a limit leaves no room, or if other claims
  // wait for memory.
  absl::Status Acquire(StagingClaim* claim);

  // Appends the claim to the wait queue, which is served in order, whatever the sizes; claims of
  // clients that hold their share are passed over. RESOURCE_EXHAUSTED if the queue is full, if the
  // client holds its share and has kMaxWaitingOverShare claims in it, or if the claim can never
  // fit. The claim must live until LeaveQueue.
  absl::Status JoinQueue(StagingClaim* claim);
  // Call it once after JoinQueue returned OK. True if the claim has its buffers.
  bool LeaveQueue(StagingClaim* claim);
  // Refuses all queued claims, and those that would join, with `status`.
  void EndWaits(const absl::Status& status);
  // RESOURCE_EXHAUSTED, with what the claim needs and what is in use.
  absl::Status FullError(const StagingClaim& claim) const;

  size_t limit_bytes() const { return limit_bytes_; }
  size_t used_bytes() const;  // of buffers in use
  size_t free_bytes() const;  // of buffers kept for reuse
  size_t waiting() const;     // claims in the queue

  // The capacity of the buffer for a claim of `bytes`.
  static size_t SizeClass(size_t bytes);

 private:
  friend class StagingBuffer;
  struct Waiter {
    StagingClaim* claim;
    StagingAccounts::iterator account;
  };
  void Release(StagingAccounts::iterator account, std::byte* data, size_t capacity);
  StagingAccounts::iterator AccountOf(const StagingClaim& claim)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(StagingAccounts::iterator account) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool CanEverFit(const StagingClaim& claim) const;
  // Whether the client, with the claim, would hold more than its share.
  bool IsOverShare(const StagingClaim& claim, const StagingAccount& account) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Both buffers, or neither and false.
  bool TryAcquire(StagingClaim* claim, StagingAccounts::iterator account)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // From the queue. Returns its account.
  StagingAccounts::iterator Remove(std::list<Waiter>::iterator place)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Grants claims from the front of the queue while memory suffices.
  void ServeQueue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status FullLocked(const StagingClaim& claim) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Null if the allocator has none. The caller has checked the limit.
  std::byte* Allocate(size_t capacity) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Keep(std::byte* data, size_t capacity) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Frees the largest kept buffer. False if there is none.
  bool FreeLargest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t limit_bytes_;
  const Allocator allocator_;
  const size_t max_waiting_bytes_;
  const size_t client_bytes_;  // 0: no limit
  mutable Mutex mutex_;
  CondVar all_released_;
  std::map<size_t, std::vector<std::byte*>> free_ ABSL_GUARDED_BY(mutex_);  // by capacity
  size_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t free_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Some are idle: clients come back.
  StagingAccounts accounts_ ABSL_GUARDED_BY(mutex_);
  std::list<Waiter> queue_ ABSL_GUARDED_BY(mutex_);      // oldest first
  bool memory_awaited_ ABSL_GUARDED_BY(mutex_) = false;  // by a claim that is within its share
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);           // of EndWaits
  size_t waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;     // input_bytes of the queued claims
};

// One request's wait for staging memory, without a thread. An alarm goes off when the time is over,
// and is cancelled when the memory is there. Either way the wait ends on the alarm's thread, not on
// the one that released the memory. Thread-safe.
//
// Lock order: mutex_, then the pool's, then those inside the alarm. Memory is released, and so the
// pool's lock is taken, also inside gRPC; nothing that runs under the pool's lock takes mutex_.
class StagingWait {
 public:
  // Queues `claim`. Calls `done`, which may destroy this, exactly once, on the alarm's thread: OK
  // with the claim's buffers, DEADLINE_EXCEEDED after `limit`, CANCELLED, or RESOURCE_EXHAUSTED if
  // the queue is full. Call it at most once. Pool and claim outlive the wait.
  void Start(StagingPool* pool, StagingClaim* claim, Nanoseconds limit,
             std::unique_ptr<Alarm> alarm, absl::AnyInvocable<void(absl::Status)> done)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Ends the wait, if there is one now or later. From any thread.
  void Cancel() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void End() ABSL_LOCKS_EXCLUDED(mutex_);

  StagingPool* pool_ = nullptr;
  StagingClaim* claim_ = nullptr;
  absl::AnyInvocable<void(absl::Status)> done_;

  Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);  // not OK: the claim is not in the queue
  // Null before Start. StagingClaim::granted uses it without mutex_: it is set before the claim
  // joins the queue, and not changed.
  std::unique_ptr<Alarm> alarm_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_MEMORY_STAGING_POOL_H_
