// What a client has on one connection of the local socket: memory, rings for blocking calls, and
// one for callbacks. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_LOCAL_SESSION_H_
#define FLASHCORE_CLIENT_CPP_LOCAL_SESSION_H_

#include <atomic>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/local/arena.h"
#include "client/cpp/local/async_ring.h"
#include "client/cpp/local/control.h"
#include "client/cpp/local/ring_request.h"
#include "client/cpp/local/timed_mutex.h"
#include "client/cpp/memory.h"
#include "flashcore/attend.h"

namespace flashcore::client::local {

// Thread-safe. Ends with its connection; requests in flight are then UNAVAILABLE.
class Session {
 public:
  // `spin`: see ClientOptions::local_spin. `regions` outlives it.
  Session(std::shared_ptr<Control> control, const RegionTable* regions, absl::Duration spin);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  Control& control() const { return *control_; }
  bool alive() const { return !control_->ended(); }

  // One attempt, on this thread: over a ring of its own while it runs. Sets the result's bytes.
  absl::Status Attend(const AttendRequest& request, absl::Time deadline, AttendResult* result)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // `request` with its tensors in this session's memory.
  absl::Status Prepare(const AttendRequest& request, absl::Time deadline, RingRequest* prepared) {
    return prepared->Prepare(request, *regions_, arena_.get(), deadline);
  }
  // Opened with the first use.
  absl::StatusOr<AsyncRing*> async(absl::Time deadline) ABSL_LOCKS_EXCLUDED(async_mutex_);

  // Memory for something else than an AttendRequest.
  absl::StatusOr<Arena::Block> Allocate(size_t bytes, absl::Time deadline) {
    return arena_->Allocate(bytes, deadline);
  }

 private:
  // A ring of one slot and the request in it. Used by one thread at a time.
  struct Lane;

  // A lane nobody uses; null if there are enough of them, all in use.
  absl::StatusOr<Lane*> TakeLane(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  void ReturnLane(Lane* lane) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status AttendOn(Lane* lane, const AttendRequest& request, absl::Time deadline,
                        AttendResult* result);
  absl::Status AttendOnAsync(const AttendRequest& request, absl::Time deadline,
                             AttendResult* result);
  // Over the ring of the callbacks, or as a call. Its memory is kept until the server is done.
  absl::Status RunOnAsync(std::shared_ptr<RingRequest> prepared, absl::Time deadline,
                          AttendResult* result);

  const std::shared_ptr<Control> control_;
  const RegionTable* const regions_;
  const std::chrono::nanoseconds spin_;
  const std::shared_ptr<Arena> arena_;

  absl::Mutex mutex_;
  std::vector<std::unique_ptr<Lane>> lanes_ ABSL_GUARDED_BY(mutex_);
  std::vector<Lane*> free_ ABSL_GUARDED_BY(mutex_);  // the last one was used last
  // Their request was given up, and the server has not answered it.
  std::vector<Lane*> abandoned_ ABSL_GUARDED_BY(mutex_);
  size_t max_lanes_ ABSL_GUARDED_BY(mutex_);
  size_t opening_ ABSL_GUARDED_BY(mutex_) = 0;

  TimedMutex open_async_mutex_;
  absl::Mutex async_mutex_;
  std::shared_ptr<AsyncRing> async_ ABSL_GUARDED_BY(async_mutex_);
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_CPP_LOCAL_SESSION_H_
