// One connection of the local socket: calls, registered memory and rings, until either side ends
// it. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_LOCAL_CONTROL_H_
#define FLASHCORE_CLIENT_CPP_LOCAL_CONTROL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/local/outbox.h"
#include "client/cpp/local/region.h"
#include "client/cpp/local/ring.h"
#include "client/cpp/local/socket.h"
#include "flashcore/v1/local.pb.h"

namespace flashcore::client::local {

// SteadyTime::max() for absl::InfiniteFuture().
SteadyTime ToSteady(absl::Time deadline);

// Thread-safe. Everything that came through it ends with it: calls and requests in flight are then
// UNAVAILABLE, or end with the status that the server gave.
class Control : public std::enable_shared_from_this<Control> {
 public:
  // Connects and says Hello; `client` is for the server's log.
  static absl::StatusOr<std::shared_ptr<Control>> Connect(const std::string& path,
                                                          const std::string& client,
                                                          absl::Time deadline);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  const std::string& identity() const { return identity_; }
  // True once the connection has ended.
  const std::atomic<bool>& ended() const { return ended_; }
  absl::Status end_status() const ABSL_LOCKS_EXCLUDED(mutex_);  // not OK, once it has ended

  // `reply` is null unless the status is OK. Runs on a thread of the connection: must not block.
  using Done = std::function<void(absl::Status status, v1::LocalReply* reply, UniqueFd fd)>;

  // Sends `request` under a new id, which is returned; does not wait for the server to read. OK
  // means that `done` runs exactly once, with DEADLINE_EXCEEDED if the server did not read by the
  // deadline.
  absl::StatusOr<uint64_t> Start(v1::LocalRequest* request, int fd, absl::Time deadline, Done done)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The same, and waits for the reply. After the deadline the reply is dropped, and a call is
  // cancelled.
  absl::StatusOr<v1::LocalReply> Exchange(v1::LocalRequest* request, int fd, absl::Time deadline,
                                          UniqueFd* reply_fd = nullptr);
  // Sends a request whose reply, if it has one, does not matter.
  void Tell(v1::LocalRequest* request);
  // Cancels a call of Start, by its id.
  void CancelCall(uint64_t id);

  // One attempt of a unary RPC. `message` is its serialized request; the result, its response.
  absl::StatusOr<std::string> Call(absl::string_view method, std::string message,
                                   absl::Time deadline);

  // Returns the region_id. The first `bytes` of the region, a multiple of the page size.
  absl::StatusOr<std::string> Register(int fd, size_t bytes, bool read_only, absl::Time deadline);
  void Unregister(const std::string& region_id);

  // `hook` runs when the connection ends, on the reader's thread; at once if it has. Until Remove
  // returns.
  uint64_t AddEndHook(std::function<void()> hook) ABSL_LOCKS_EXCLUDED(mutex_);
  void RemoveEndHook(uint64_t id) ABSL_LOCKS_EXCLUDED(mutex_);

  // Lets the reader's thread end the connection with `status`. Safe under locks of the caller.
  void Abort(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  explicit Control(FrameSocket socket)
      : socket_(std::move(socket)), outbox_(&socket_, [this](uint64_t id) { Expire(id); }) {}
  void SendQuietly(const v1::LocalRequest& request);
  absl::Status Hello(const std::string& client, absl::Time deadline);
  void Read();
  void End(absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  void Take(v1::LocalReply* reply, UniqueFd fd) ABSL_LOCKS_EXCLUDED(mutex_);
  void Expire(uint64_t id) ABSL_LOCKS_EXCLUDED(mutex_);
  Done TakeDone(uint64_t id) ABSL_LOCKS_EXCLUDED(mutex_);  // null: nobody waits any more

  FrameSocket socket_;
  std::string identity_;  // set by Hello
  std::thread reader_;
  std::atomic<bool> ended_{false};
  mutable absl::Mutex mutex_;
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  absl::flat_hash_map<uint64_t, Done> waiting_ ABSL_GUARDED_BY(mutex_);  // by id
  absl::flat_hash_map<uint64_t, std::function<void()>> end_hooks_ ABSL_GUARDED_BY(mutex_);
  absl::Status abort_status_ ABSL_GUARDED_BY(mutex_);
  absl::Status end_status_ ABSL_GUARDED_BY(mutex_);
  Outbox outbox_;  // its thread uses the other members
};

// A ring of a connection. Does not own its memory.
class OpenRing {
 public:
  // `memory` is in the registered region `region_id`, at `offset`, aligned to kRingAlignment. It is
  // zeroed here, and outlives the ring and the connection.
  static absl::StatusOr<std::unique_ptr<OpenRing>> Open(std::shared_ptr<Control> control,
                                                        std::byte* memory,
                                                        const std::string& region_id, size_t offset,
                                                        uint32_t slots, uint32_t slot_bytes,
                                                        absl::Time deadline);
  // Closes it; the server cancels what is unanswered.
  ~OpenRing();
  OpenRing(const OpenRing&) = delete;
  OpenRing& operator=(const OpenRing&) = delete;

  Ring& ring() { return ring_; }
  // Submits what is in ring().NextSlot(), and wakes the server if it sleeps.
  void Submit(uint64_t tag, uint64_t timeout_ns, size_t bytes);
  void Cancel(uint64_t tag);

 private:
  OpenRing(std::shared_ptr<Control> control, uint32_t number, UniqueFd doorbell, std::byte* memory,
           uint32_t slots, uint32_t slot_bytes);

  const std::shared_ptr<Control> control_;
  const uint32_t number_;
  const UniqueFd doorbell_;
  Ring ring_;
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_CPP_LOCAL_CONTROL_H_
