// The bounded queue between the transport and the lanes. Forms the batches.
#ifndef FLASHCORE_SERVER_ENGINE_BATCHER_H_
#define FLASHCORE_SERVER_ENGINE_BATCHER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/device/device.h"
#include "server/kv/operation.h"
#include "server/request/request.h"

namespace flashcore::server {

// Operations of one geometry for one launch, or one operation for the next part of its launch.
// Operations on the same layer of the same sequence are in arrival order.
struct Batch {
  std::vector<AttendOperation*> operations;
  // Removed from the queue, not to be launched, or not any further, with the reason:
  // DEADLINE_EXCEEDED or CANCELLED.
  std::vector<std::pair<AttendOperation*, absl::Status>> dropped;
  uint64_t serial = 0;  // set by the Batcher

  void clear() {
    operations.clear();
    dropped.clear();
  }
};

// Clients are served fairly: the one that was served the least work goes first, and its oldest
// request decides the geometry. Requests of that geometry then join while they fit, in the same
// order. An operation is taken only when its OrderSlots allow it. Thread-safe. Owns no operation.
//
// An operation with more work than a launch may have is taken alone, and comes back with Return
// after each part of its launch: then it is first in its client's queue, still holds its
// OrderSlots, and waits until its client is first again.
//
// This is start-time fair queueing. A client's virtual time is the work it was served: the
// estimated time on the device, in nanoseconds. An idle client returns at the least virtual time of
// the active ones, unless its own is later, so idling earns no credit. When the queue is empty, all
// clients are equal again.
class Batcher {
 public:
  struct Options {
    int max_queue_requests = 1024;     // waiting; the next one is refused
    int max_batch_requests = 64;       // per batch
    int64_t max_batch_tokens = 65536;  // per batch, unless the first request alone has more
    // How long a batch that is not full may wait for more requests while a lane is idle.
    Nanoseconds max_queue_delay{0};
    // How long an idle Take spins before it sleeps, to save the time to wake its thread. One lane
    // spins at a time.
    Nanoseconds idle_spin{0};
    // Estimated work of a batch, unless the first request alone has more.
    Nanoseconds max_launch = std::chrono::milliseconds(10);
    DeviceSpeed speed{};  // for the estimate
  };

  Batcher(const Options& options, const Clock* clock) : options_(options), clock_(clock) {}
  Batcher(const Batcher&) = delete;
  Batcher& operator=(const Batcher&) = delete;

  // RESOURCE_EXHAUSTED if the queue is full, UNAVAILABLE after Close; the operation is then not
  // queued. Sets `submitted`, `tokens` and `work`. The operation's `order` and the slots in it must
  // not move until the operation is dropped, displaced or released.
  //
  // Clients share a full queue: if another client has more requests waiting than this one would
  // have, the newest request of the client with the most makes room. It is put into *displaced
  // (else null), and the caller completes it with RESOURCE_EXHAUSTED.
  absl::Status Enqueue(AttendOperation* operation, AttendOperation** displaced);

  // Waits until something can be taken, and fills `*batch`. Both lists are empty after Wake;
  // `operations` is empty if everything had to be dropped. False once the batcher is closed and
  // empty. Call Release for every batch with operations.
  //
  // A cancelled or expired operation is dropped when the search reaches it, even if its slots would
  // not allow it to run. The search ends when the batch is full.
  bool Take(Batch* batch);

  // These operations of a batch have ended: those that waited for them may run. Call it before
  // `done` of any of them, which may destroy them and their slots. A dropped operation is released
  // if its launch had begun.
  void Release(absl::Span<AttendOperation* const> operations);
  void Release(const Batch& batch) { Release(batch.operations); }

  // Puts the last operations of a batch, in their order, back where they were: they were not
  // launched, or have more parts. Uses their `work` from now on. An error, the one that EndAll was
  // given: they are not in the queue, and the caller ends them.
  absl::Status Return(absl::Span<AttendOperation* const> operations);

  // An idle lane may stage the launch of one operation that is not queued, because its inputs are
  // not ready. It counts as running from BeginStaging on, which is false if the lane is needed or
  // others must run first. The lane gives it up when StagingMustEnd: an operation is queued that no
  // other lane takes, or that would run first, or the batcher is closed. `launched`: it is not
  // given up; Release comes when it has ended. EndStaging is a Wake, too: the next may be staged.
  bool MayStage() const;
  bool BeginStaging(AttendOperation* operation);
  bool StagingMustEnd() const { return lane_wanted_.load(std::memory_order_relaxed); }
  void EndStaging(AttendOperation* operation, bool launched);

  // Makes one waiting Take return, or the next one if none waits. Several calls before that count
  // as one.
  void Wake();

  // Refuses new operations. Take returns what is queued, without delay, and then false.
  void Close();

  // Close, and takes everything out of the queue. The caller ends these operations with `status`,
  // and releases those whose launch had begun.
  std::vector<AttendOperation*> EndAll(const absl::Status& status);

  int depth() const;       // requests waiting
  size_t clients() const;  // active, or idle and remembered

 private:
  friend class BatcherTest;  // steps through batches without waiting

  using Queue = std::list<AttendOperation*>;

  struct Client {
    std::string name;
    Queue queue;         // oldest first
    int64_t served = 0;  // virtual time
    // The value of activations_ when it became active: the earlier of equally served clients first.
    uint64_t active_since = 0;
  };
  using Clients = std::list<Client>;

  struct Cursor;
  struct Choice;
  struct Forming;

  // As Take, but does not wait. False if nothing can be taken or dropped now. *retry is then the
  // time to try again; kNoDeadline: not before something changes.
  bool TryTake(Batch* batch, TimePoint* retry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Choose(Forming* forming) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Queue::iterator FindNext(Cursor* cursor, Forming* forming) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Commit(const Forming& forming) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PutBack(Forming* forming) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UpdateClients() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  AttendOperation* Displace(const std::string& newcomer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Client* Activate(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Erase(Client* client, Queue::iterator position) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t Charge(const AttendOperation& operation) const;
  void Park(TimePoint retry, TimePoint spin_end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Spin(TimePoint end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WakeOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UpdateLaneWanted() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool CanStage() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WakeAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const Clock* const clock_;

  mutable Mutex mutex_;                     // also guards the OrderSlots
  Clients active_ ABSL_GUARDED_BY(mutex_);  // clients with queued operations
  // Clients without, remembered while they are ahead of virtual_time_; longest idle first. At most
  // max_queue_requests.
  Clients idle_ ABSL_GUARDED_BY(mutex_);
  // Active and idle clients by Client::name.
  std::unordered_map<std::string_view, Clients::iterator> clients_ ABSL_GUARDED_BY(mutex_);
  int depth_ ABSL_GUARDED_BY(mutex_) = 0;             // operations in all queues
  int64_t virtual_time_ ABSL_GUARDED_BY(mutex_) = 0;  // of a client that becomes active
  int64_t most_served_ ABSL_GUARDED_BY(mutex_) = 0;   // the greatest Client::served so far
  uint64_t activations_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_serial_ ABSL_GUARDED_BY(mutex_) = 0;
  // Sleeping lanes that have not been woken yet; the most recently parked is last.
  std::vector<CondVar*> sleepers_ ABSL_GUARDED_BY(mutex_);
  int idle_lanes_ ABSL_GUARDED_BY(mutex_) = 0;   // in Take
  uint64_t staged_ ABSL_GUARDED_BY(mutex_) = 0;  // the batch of the staged operation; 0: none
  bool queued_before_staged_ ABSL_GUARDED_BY(mutex_) =
      false;  // an operation on a slot of it is queued
  std::atomic<bool> lane_wanted_{false};
  bool spinning_ ABSL_GUARDED_BY(mutex_) = false;  // one idle lane spins; it is not in sleepers_
  std::atomic<bool> spinner_woken_{false};
  bool wake_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mutex_);  // not OK after EndAll
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ENGINE_BATCHER_H_
