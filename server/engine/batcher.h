// The bounded queue between the transport and the lanes, and the choice of what runs together.
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
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/request/request.h"

namespace flashcore::server {

// Requests of one geometry that one launch serves. Those on one layer of one sequence are in the
// order of their arrival.
struct Batch {
  std::vector<AttendOperation*> operations;
  // Left the queue without being launched, each with the reason (DEADLINE_EXCEEDED or CANCELLED).
  std::vector<std::pair<AttendOperation*, absl::Status>> dropped;
  uint64_t serial = 0;  // the Batcher's

  void clear() {
    operations.clear();
    dropped.clear();
  }
};

// Forms batches. Clients take turns: the one that has been served the fewest tokens goes first, its
// oldest request decides the geometry, and then requests of the same geometry join, again client by
// client, while they fit. A client that was idle gains nothing by it. An operation is taken only
// when its OrderSlots let it. Thread-safe. Owns no operation.
//
// This is start-time fair queueing: a client's virtual time is the tokens that it was served, and
// one that has nothing waiting comes back at the virtual time of the least served that has, unless
// its own is later. When the queue runs empty, all clients are equal again.
class Batcher {
 public:
  struct Options {
    int max_queue_requests = 1024;     // waiting; one more is refused
    int max_batch_requests = 64;       // in one batch
    int64_t max_batch_tokens = 65536;  // in one batch, unless its first request has more
    // How long a request may wait for company while a lane is idle. 0: not at all.
    Nanoseconds max_queue_delay{0};
    // How long a Take that has nothing to do keeps looking before it sleeps, one at a time: what
    // comes meanwhile does not wait for a thread to wake up.
    Nanoseconds idle_spin{0};
  };

  Batcher(const Options& options, const Clock* clock) : options_(options), clock_(clock) {}
  Batcher(const Batcher&) = delete;
  Batcher& operator=(const Batcher&) = delete;

  // RESOURCE_EXHAUSTED if the queue is full, UNAVAILABLE after Close; the operation is then not
  // taken. Fills in submitted and tokens. The operation's slots, and its `order`, stay in place
  // until it is dropped, displaced or released.
  //
  // A full queue belongs to all: if another client has more requests waiting than this one would
  // have, the youngest of the client that has most leaves the queue to make room. It is put into
  // *displaced (else null), and the caller ends it with RESOURCE_EXHAUSTED.
  absl::Status Enqueue(AttendOperation* operation, AttendOperation** displaced);

  // Waits until something can be taken and fills `*batch`. Both of its lists are empty after Wake;
  // `operations` alone if all that could be taken had to be dropped. False once the batcher is
  // closed and empty. Every batch with operations is given back to Release.
  //
  // An operation that must not be launched any more is dropped when its turn comes, even if its
  // slots would not let it go: a Take that has filled its batch does not search on for more.
  bool Take(Batch* batch);

  // As Take, but does not wait: false if there is nothing to take or to drop now, or if it is left
  // to a Take that waits. *retry is then when to try again if nothing else happens, kNoDeadline if
  // there is no such time.
  bool TryTake(Batch* batch, TimePoint* retry);

  // The batch has ended: what waited for it may run. To be called before `done` of any of its
  // operations, after which they and their slots may be gone.
  void Release(const Batch& batch);

  // Makes one waiting Take return, or the next one if none waits. Calls that no Take has noticed
  // yet count as one.
  void Wake();

  // No more Enqueue. Take hands out what is waiting, without delay, and then returns false.
  void Close();

  int depth() const;       // requests waiting
  size_t clients() const;  // that it remembers

 private:
  using Queue = std::list<AttendOperation*>;

  struct Client {
    std::string name;
    Queue queue;         // oldest first
    int64_t served = 0;  // its virtual time: tokens
    // When it became active, in activations: of clients served alike, the first goes first.
    uint64_t active_since = 0;
  };
  using Clients = std::list<Client>;

  struct Turn;
  struct Choice;
  struct Forming;

  bool TryTakeLocked(Batch* batch, TimePoint* retry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Choose(Forming* forming) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Queue::iterator FindNext(Turn* turn, Forming* forming) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Commit(const Forming& forming) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PutBack(Forming* forming) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SettleClients() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  AttendOperation* Displace(const std::string& newcomer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Client* Activate(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Erase(Client* client, Queue::iterator position) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Await(TimePoint retry, TimePoint spin_end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Spin(TimePoint end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NotifyOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NotifyAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NotifyNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const Clock* const clock_;

  mutable Mutex mutex_;                     // also guards the OrderSlots
  Clients active_ ABSL_GUARDED_BY(mutex_);  // something waits
  // Nothing waits, but they are ahead of virtual_time_, or were when they became idle; longest idle
  // first. At most max_queue_requests.
  Clients idle_ ABSL_GUARDED_BY(mutex_);
  // Both, by Client::name.
  std::unordered_map<std::string_view, Clients::iterator> clients_ ABSL_GUARDED_BY(mutex_);
  int depth_ ABSL_GUARDED_BY(mutex_) = 0;             // of all queues together
  int64_t virtual_time_ ABSL_GUARDED_BY(mutex_) = 0;  // where a client comes in
  int64_t most_served_ ABSL_GUARDED_BY(mutex_) = 0;   // of all clients ever
  uint64_t activations_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_serial_ ABSL_GUARDED_BY(mutex_) = 0;
  int waiting_takes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Of those of them that sleep and have not been told to look again, the one that waits shortest
  // last.
  std::vector<CondVar*> untold_takes_ ABSL_GUARDED_BY(mutex_);
  bool spinning_ ABSL_GUARDED_BY(mutex_) = false;  // one of them, which is in no list
  std::atomic<bool> spinner_told_{false};          // to look again
  bool wake_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ENGINE_BATCHER_H_
