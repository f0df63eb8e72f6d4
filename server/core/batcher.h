// The bounded queue between the transport and the lanes, and the choice of what runs together.
#ifndef FLASHCORE_SERVER_CORE_BATCHER_H_
#define FLASHCORE_SERVER_CORE_BATCHER_H_

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "server/core/clock.h"
#include "server/core/mutex.h"
#include "server/core/request.h"

namespace flashcore::server {

// Requests of one geometry that one launch serves, in the order of their arrival.
struct Batch {
  std::vector<AttendOperation*> operations;
  // Left the queue without being launched, each with the reason (DEADLINE_EXCEEDED or CANCELLED).
  std::vector<std::pair<AttendOperation*, absl::Status>> dropped;

  void clear() {
    operations.clear();
    dropped.clear();
  }
};

// Forms batches first come, first served: the oldest request decides the geometry, and later ones
// of the same geometry join it while they fit. Nobody waits for a batch to fill up: what is there
// when a lane asks is what it gets. Thread-safe. Owns no operation.
class Batcher {
 public:
  struct Options {
    int max_queue_requests = 1024;         // waiting; one more is refused
    int max_batch_requests = 64;           // in one batch
    int64_t max_batch_query_rows = 65536;  // in one batch, unless its first request has more
  };

  Batcher(const Options& options, const Clock* clock) : options_(options), clock_(clock) {}

  // RESOURCE_EXHAUSTED if the queue is full, UNAVAILABLE after Close; the operation is then not
  // taken. Fills in what of it is the engine's.
  absl::Status Enqueue(AttendOperation* operation);

  // Waits until something can be taken and fills `*batch`; `operations` is empty if all that was
  // waiting had to be dropped. False once the batcher is closed and empty.
  bool Take(Batch* batch);

  // No more Enqueue. Take hands out what is waiting and then returns false.
  void Close();

  int depth() const;  // requests waiting

 private:
  // Moves the expired and the cancelled from the queue to batch->dropped.
  void DropDead(Batch* batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const Clock* const clock_;
  mutable Mutex mutex_;
  CondVar not_empty_;
  std::deque<AttendOperation*> queue_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_CORE_BATCHER_H_
