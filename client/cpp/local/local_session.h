// A client's state on one connection of the local socket: memory, rings for blocking calls, and one
// for callbacks. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_LOCAL_LOCAL_SESSION_H_
#define FLASHCORE_CLIENT_CPP_LOCAL_LOCAL_SESSION_H_

#include <atomic>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/local/async_ring.h"
#include "client/cpp/local/convert.h"
#include "client/cpp/local/ring_request.h"
#include "client/cpp/memory.h"
#include "client/local/block_pool.h"
#include "client/local/connection.h"
#include "client/local/cuda.h"
#include "client/local/timed_mutex.h"
#include "client/local/timeline.h"
#include "flashcore/attend.h"

namespace flashcore::client::local {

// Thread-safe. Ends with its connection; requests in flight are then UNAVAILABLE.
class LocalSession {
 public:
  // `spin`: see ClientOptions::local_spin. `regions` outlives it.
  LocalSession(std::shared_ptr<Connection> connection, const RegionTable* regions,
               absl::Duration spin);
  ~LocalSession();
  LocalSession(const LocalSession&) = delete;
  LocalSession& operator=(const LocalSession&) = delete;

  Connection& connection() const { return *connection_; }
  bool alive() const { return !connection_->ended(); }
  absl::Status end_status() const { return ToAbsl(connection_->end_status()); }

  // One attempt of a unary RPC; see Transport::Call.
  absl::Status Call(const google::protobuf::Message& request, SteadyTime deadline,
                    google::protobuf::Message* response);
  // One attempt, on this thread: over a ring of its own while it runs. Sets the result's bytes.
  absl::Status Attend(const AttendRequest& request, SteadyTime deadline, AttendResult* result)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // `request` with its tensors in this connection's memory.
  absl::Status Prepare(const AttendRequest& request, SteadyTime deadline, RingRequest* prepared) {
    return prepared->Prepare(request, *regions_, pool_.get(), deadline);
  }
  // The same for StartOnCudaStream, which comes next: nothing is copied, and the counters of
  // `stream` are there.
  absl::Status PrepareOnCudaStream(const AttendRequest& request, CuStream stream,
                                   SteadyTime deadline, RingRequest* prepared);
  // One attempt; see AsyncRing.
  absl::StatusOr<uint64_t> StartOnCudaStream(std::shared_ptr<RingRequest> prepared, CuStream stream,
                                             SteadyTime deadline, AsyncRing::Done* done);
  // Opened with the first use.
  absl::StatusOr<AsyncRing*> async(SteadyTime deadline) ABSL_LOCKS_EXCLUDED(async_mutex_);

  // Memory for something else than an AttendRequest.
  absl::Status Allocate(size_t bytes, SteadyTime deadline, BlockPool::Block* block) {
    return ToAbsl(pool_->Allocate(bytes, deadline, block));
  }

 private:
  // A ring of one slot and the request in it. Used by one thread at a time.
  struct CallRing;

  // One that nobody uses; null if there are enough of them, all in use.
  absl::StatusOr<CallRing*> TakeCallRing(SteadyTime deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  void ReturnCallRing(CallRing* call_ring) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status AttendOn(CallRing* call_ring, const AttendRequest& request, SteadyTime deadline,
                        AttendResult* result);
  absl::Status AttendOnAsync(const AttendRequest& request, SteadyTime deadline,
                             AttendResult* result);
  // Over the ring of the callbacks, or as a call. Its memory is kept until the server is done.
  absl::Status RunOnAsync(std::shared_ptr<RingRequest> prepared, SteadyTime deadline,
                          AttendResult* result);

  const std::shared_ptr<Connection> connection_;
  const RegionTable* const regions_;
  const std::chrono::nanoseconds spin_;
  const std::shared_ptr<BlockPool> pool_;
  Timelines timelines_;

  absl::Mutex mutex_;
  std::vector<std::unique_ptr<CallRing>> call_rings_ ABSL_GUARDED_BY(mutex_);
  std::vector<CallRing*> free_ ABSL_GUARDED_BY(mutex_);  // the last one was used last
  // Their request was given up, and the server has not answered it.
  std::vector<CallRing*> abandoned_ ABSL_GUARDED_BY(mutex_);
  size_t max_call_rings_ ABSL_GUARDED_BY(mutex_);
  size_t opening_ ABSL_GUARDED_BY(mutex_) = 0;

  TimedMutex open_async_mutex_;
  absl::Mutex async_mutex_;
  std::shared_ptr<AsyncRing> async_ ABSL_GUARDED_BY(async_mutex_);
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_CPP_LOCAL_LOCAL_SESSION_H_
