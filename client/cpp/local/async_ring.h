// Requests with callbacks, over one ring of a connection. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_LOCAL_ASYNC_RING_H_
#define FLASHCORE_CLIENT_CPP_LOCAL_ASYNC_RING_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/local/ring_request.h"
#include "client/local/block_pool.h"
#include "client/local/connection.h"
#include "client/local/cuda.h"
#include "client/local/timeline.h"
#include "flashcore/attend.h"

namespace flashcore::client::local {

// Its thread waits for answers and runs the callbacks. Requests beyond the ring's slots wait here,
// in order. Thread-safe.
class AsyncRing {
 public:
  using Done = std::function<void(absl::Status, AttendResult)>;

  // `pool` is what the requests' blocks are of; the thread keeps it.
  static absl::StatusOr<std::shared_ptr<AsyncRing>> Open(std::shared_ptr<Connection> connection,
                                                         std::shared_ptr<BlockPool> pool,
                                                         SteadyTime deadline);
  // Lets the thread end once no request is left, and waits for it unless it is this thread. No
  // Start may follow.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);
  ~AsyncRing();

  // `done` runs once, on the thread, at `deadline` at the latest. Until the server is done with it,
  // which may be later, the request is kept. Returns a ticket for Cancel.
  uint64_t Start(std::shared_ptr<RingRequest> request, SteadyTime deadline, Done done)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The same in the order of a CUDA stream; may block while the stream has no room. One thread at a
  // time enqueues, so that requests of a stream are in the ring in its order. After an error, in
  // which case `*done` is as it was, the stream does not wait. `timelines` are open, of the same
  // connection.
  absl::StatusOr<uint64_t> StartOnCudaStream(std::shared_ptr<RingRequest> request, CuStream stream,
                                             Timelines* timelines, SteadyTime deadline, Done* done)
      ABSL_LOCKS_EXCLUDED(order_mutex_, mutex_);
  // `done` then runs with CANCELLED, unless it has run.
  void Cancel(uint64_t ticket) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    std::shared_ptr<RingRequest> request;
    SteadyTime deadline;
    Done done;             // null: it has run, or has been taken to run
    bool awaited = false;  // by a CUDA stream, so it is submitted even if it was given up
    bool in_ring = false;
    uint64_t call_id = 0;  // of the connection, if the message does not fit in a slot
  };
  struct Ended {  // a callback to run
    Done done;
    absl::Status status;
    AttendResult result;
  };

  AsyncRing(std::shared_ptr<Connection> connection, std::shared_ptr<BlockPool> pool,
            BlockPool::Block memory, std::unique_ptr<OpenRing> ring);

  uint64_t Add(Entry entry) ABSL_LOCKS_EXCLUDED(mutex_);
  bool FitsInSlot(const RingRequest& request) const;
  void Run();
  // Moves what has ended to `ended`. Returns when to look again at the latest.
  SteadyTime Collect(std::vector<Ended>* ended) ABSL_LOCKS_EXCLUDED(mutex_);
  void TakeAnswers(std::vector<Ended>* ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Pump()
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // submits what waits, as long as there is room
  void SendAsCall(uint64_t ticket, Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CancelSent(uint64_t ticket, const Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveUp(uint64_t ticket, Entry* entry, absl::Status status, std::vector<Ended>* ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Idle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Kick();  // lets the thread look again

  const std::shared_ptr<Connection> connection_;
  const std::shared_ptr<BlockPool> pool_;
  const BlockPool::Block memory_;  // of the ring
  const std::unique_ptr<OpenRing> ring_;
  uint64_t end_hook_ = 0;
  std::thread thread_;
  std::atomic<bool> kicked_{false};

  absl::Mutex order_mutex_;  // taken before mutex_
  absl::Mutex mutex_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t next_ticket_ ABSL_GUARDED_BY(mutex_) = 1;
  absl::flat_hash_map<uint64_t, Entry> entries_ ABSL_GUARDED_BY(mutex_);  // by ticket, the tag
  std::deque<uint64_t> queue_ ABSL_GUARDED_BY(mutex_);                    // tickets to submit
  std::vector<uint64_t> cancelled_ ABSL_GUARDED_BY(mutex_);
  struct CallAnswer {
    uint64_t ticket;
    absl::Status status;
    std::string message;
  };
  std::vector<CallAnswer> call_answers_ ABSL_GUARDED_BY(mutex_);
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;  // that the connection has not answered
  SteadyTime look_again_ ABSL_GUARDED_BY(mutex_) = SteadyTime::max();
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_CPP_LOCAL_ASYNC_RING_H_
