// A ring and its requests, from the slot of one to the slot of the other.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_RING_SESSION_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_RING_SESSION_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "server/base/mutex.h"
#include "server/base/use_count.h"
#include "server/memory/regions.h"
#include "server/request/identity.h"
#include "server/transport/local/ring.h"
#include "server/transport/rpc/exchange.h"

namespace flashcore::server::local {

// The server's end of one ring. Its connection, the poller, and its requests in the engine share
// it, so it is destroyed when nobody uses the ring any more. Thread-safe, but only the poller's
// thread calls Poll, HasNews and Sleep.
class RingSession final : public std::enable_shared_from_this<RingSession> {
 public:
  // `broken`: called at most once, by Poll, when the client broke the protocol.
  // `gone`: called by the destructor.
  struct Callbacks {
    absl::AnyInvocable<void(const absl::Status&)> broken;
    absl::AnyInvocable<void()> gone;
  };

  // `attend`: what its requests are exchanges of. It and `uses` outlive this.
  RingSession(const Exchange::Origin& attend, UseCount* uses, Identity identity,
              std::shared_ptr<Regions> regions, std::unique_ptr<Ring> ring, Callbacks callbacks);
  ~RingSession();

  const std::string& client() const { return identity_.name; }

  // Takes some of the requests that wait in the ring. Returns whether there was one.
  bool Poll();
  bool HasNews() const { return !ended_.load(std::memory_order_relaxed) && ring_->HasNews(); }
  // Lets the client ring the doorbell for its next request, until Poll has taken that. Returns
  // HasNews, unless it was so already.
  bool Sleep();

  // Cancels the requests with `tag` that are not answered, in slots and in the engine. Its time
  // does not depend on their number.
  void Cancel(uint64_t tag) ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes no more requests, and cancels those that are not answered.
  void End() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  class Request;

  // The memory for a request, and its end.
  void* TakeBlock() ABSL_LOCKS_EXCLUDED(mutex_);
  static void Delete(Request* request);

  void Start(Request* request) ABSL_LOCKS_EXCLUDED(mutex_);  // takes it over
  void Forget(Request* request) ABSL_LOCKS_EXCLUDED(mutex_);
  void List(Request* request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void CancelAll(Request* first);  // and those behind it
  // Whether a Cancel came while the request `number` was in its slot.
  bool CancelledInSlot(uint64_t number, uint64_t tag) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Exchange::Origin attend_;
  const UseCount::Use use_;
  const Identity identity_;
  const std::shared_ptr<Regions> regions_;
  const std::unique_ptr<Ring> ring_;
  Callbacks callbacks_;
  std::atomic<bool> ended_{false};
  bool sleeps_ = false;  // of the poller
  Mutex mutex_;
  // The requests in the engine that are not cancelled: the first of each tag, which leads to
  // others.
  absl::flat_hash_map<uint64_t, Request*> requests_ ABSL_GUARDED_BY(mutex_);
  uint64_t started_ ABSL_GUARDED_BY(mutex_) = 0;  // requests, that is, the number of the next
  // tag -> request number. Requests with this tag and a smaller number are cancelled when taken.
  absl::flat_hash_map<uint64_t, uint64_t> cancels_ ABSL_GUARDED_BY(mutex_);
  uint64_t cancels_end_ ABSL_GUARDED_BY(mutex_) = 0;  // the largest of these numbers
  // Memory of ended requests: malloc is slow for what its thread caches do not hold.
  std::vector<void*> free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_RING_SESSION_H_
