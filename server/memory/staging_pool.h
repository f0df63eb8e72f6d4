// Staging memory: holds the tensors of requests in flight, between the network and the device.
#ifndef FLASHCORE_SERVER_MEMORY_STAGING_POOL_H_
#define FLASHCORE_SERVER_MEMORY_STAGING_POOL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/sharing/shares.h"

namespace flashcore::server {

class StagingPool;

// Some of the staging memory of a pool.
struct StagingUse {
  StagingPool* pool = nullptr;  // null: none
  size_t bytes = 0;
};

// A piece of staging memory; returns to its pool when destroyed. The pool outlives it.
class StagingBuffer {
 public:
  StagingBuffer() = default;

  std::byte* data() const { return data_.get(); }  // aligned to StagingPool::kAlignment, or null
  size_t capacity() const { return data_ == nullptr ? 0 : data_.get_deleter().capacity; }  // bytes
  StagingUse use() const {
    return data_ == nullptr ? StagingUse() : StagingUse{data_.get_deleter().pool, capacity()};
  }
  void Reset() { data_.reset(); }

 private:
  friend class StagingPool;
  struct Releaser {
    StagingPool* pool;
    Shares::Client* client;
    size_t capacity;
    void operator()(std::byte* data) const;
  };

  StagingBuffer(StagingPool* pool, Shares::Client* client, std::byte* data, size_t capacity)
      : data_(data, Releaser{pool, client, capacity}) {}

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
  // Called once, when the claim leaves the wait queue with its buffers or with `refusal`, by the
  // thread that released the memory, or refused it. Runs under the pool's lock: it must neither
  // block nor call the pool.
  std::function<void()> granted;
  absl::Status refusal;  // set before `granted`, which then grants nothing

 private:
  friend class StagingPool;
  struct Place : Shares::Item {
    StagingClaim* claim = nullptr;
    uint64_t number = 0;  // in order of arrival
  };
  Place place_;  // in the wait queue
};

// Hands out buffers in size classes (four per power of two) and keeps released buffers for reuse,
// because memory that a GPU can read is slow to allocate. Buffers in use and kept buffers together
// never exceed the limit. Claims that do not fit can wait in a queue. Thread-safe.
//
// Nobody waits for what others owe (Shares):
// - A client that holds its share waits for its own buffers, and holds up nobody else.
// - Work in flight ends by itself. Unread results may not. If they leave no room for a claim,
//   the client with the most overdue results (unread for long) gives back its oldest until the
//   claim fits, or until it holds no more than the claimant would. So asking for more gains
//   nothing. A claim that still does not fit because of overdue results holds up nobody else.
// - A client that has more overdue than another would hold with its claim waits behind that claim.
// - When waiting claims take too much, the newest of the client with the most is refused.
class StagingPool {
 public:
  static constexpr size_t kAlignment = 64;

  // The source of memory: the heap, or a device's pinned memory. `allocate` returns memory aligned
  // to kAlignment, or null. A pool makes one call at a time.
  struct Allocator {
    std::function<void*(size_t bytes)> allocate;
    std::function<void(void*)> free;
  };
  static Allocator HeapAllocator();

  // `max_waiting_bytes`: limit on the input_bytes of all queued claims together, of which a single
  // one may have more; 0: none. `client_bytes`: limit on the buffers in use of one client; 0: none.
  StagingPool(size_t limit_bytes, Allocator allocator, size_t max_waiting_bytes = 0,
              size_t client_bytes = 0);
  ~StagingPool();  // waits until every buffer is released
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;

  // Fills the claim's buffers. RESOURCE_EXHAUSTED if a limit leaves no room, or if other claims
  // wait for memory.
  absl::Status Acquire(StagingClaim* claim);

  // Appends the claim to the wait queue, which is served in order, whatever the sizes, but for the
  // exceptions above. RESOURCE_EXHAUSTED if the queue is full and mostly this client's, or if the
  // claim can never fit. The claim must live until LeaveQueue.
  absl::Status JoinQueue(StagingClaim* claim);
  // Call it once after JoinQueue returned OK. True if the claim has its buffers.
  bool LeaveQueue(StagingClaim* claim);
  // Refuses all queued claims, and those that would join, with `status`.
  void EndWaits(const absl::Status& status);
  // RESOURCE_EXHAUSTED, with what the claim needs and what is in use.
  absl::Status FullError(const StagingClaim& claim) const;

  // A result of `bytes` is ready, and unread until RemoveUnread: the client has read it, or will
  // give it back. `overdue`: an item for the result, in place until then.
  void AddUnread(size_t bytes);
  void RemoveUnread(size_t bytes, Shares::Item* overdue);
  // It has been unread for long. At most once in between.
  void AddOverdue(absl::string_view client, size_t bytes, Shares::Item* overdue);
  // The overdue result that has to be given back now, or null. Call it again after RemoveUnread.
  Shares::Item* Debt();
  // Called when Debt is not null any more. Runs under the pool's lock. Null: nobody wants to know.
  void SetOnDebt(std::function<void()> on_debt);

  size_t limit_bytes() const { return limit_bytes_; }
  size_t used_bytes() const;    // of buffers in use
  size_t unread_bytes() const;  // of them, of unread results
  size_t free_bytes() const;    // of buffers kept for reuse
  size_t waiting() const;       // claims in the queue

  // The capacity of the buffer for a claim of `bytes`.
  static size_t SizeClass(size_t bytes);

 private:
  friend class StagingBuffer;
  // The need of a claim, and what its client would hold with it.
  struct Need {
    size_t bytes = 0;
    size_t held = 0;
  };
  void Release(Shares::Client* client, std::byte* data, size_t capacity);
  bool CanEverFit(const StagingClaim& claim) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Need NeedOf(const StagingClaim& claim) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The client that must give back for it. Null: none, or there will be room when the work in
  // flight has ended.
  const Shares::Client* MustGiveBackFor(const Need& need) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Both buffers, or neither and false.
  bool TryAcquire(StagingClaim* claim) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The claim, within its share, has found no memory: if somebody has to give back for it, says so.
  void Await(const StagingClaim& claim) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Not for its client's own buffers, nor for clients that give nothing back.
  bool WaitsForMemory(const StagingClaim& claim, const Need& need) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The queued claim that is served next. Null: none waits for memory.
  StagingClaim* Next() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static StagingClaim* Oldest(const Shares::Client& client) {
    return client.oldest == nullptr ? nullptr
                                    : static_cast<StagingClaim::Place*>(client.oldest)->claim;
  }
  void Refuse(StagingClaim* claim, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Grants queued claims while memory suffices.
  void ServeQueue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status FullLocked(const StagingClaim& claim) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Null if the allocator has none. The caller has checked the limit.
  std::byte* Allocate(size_t capacity) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Frees the largest kept buffer. False if there is none.
  bool FreeLargest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t limit_bytes_;
  const Allocator allocator_;
  mutable Mutex mutex_;
  CondVar all_released_;
  std::map<size_t, std::vector<std::byte*>> kept_ ABSL_GUARDED_BY(mutex_);  // by capacity
  size_t allocated_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of buffers, in use or kept
  size_t unread_bytes_ ABSL_GUARDED_BY(mutex_) = 0;     // of results, overdue ones included
  // By client: buffers in use, those of them that are overdue, and input_bytes of queued claims.
  Shares shares_ ABSL_GUARDED_BY(mutex_);
  Shares overdue_ ABSL_GUARDED_BY(mutex_){{}};
  Shares queue_ ABSL_GUARDED_BY(mutex_);
  uint64_t arrivals_ ABSL_GUARDED_BY(mutex_) = 0;
  bool memory_awaited_ ABSL_GUARDED_BY(mutex_) = false;  // by a queued claim within its share
  Need needed_ ABSL_GUARDED_BY(mutex_);                  // for which somebody has to give back
  std::function<void()> on_debt_ ABSL_GUARDED_BY(mutex_);
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);  // of EndWaits
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
