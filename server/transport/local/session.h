// A ring and its requests, from the slot of one to the slot of the other.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_SESSION_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_SESSION_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "server/base/mutex.h"
#include "server/memory/regions.h"
#include "server/request/identity.h"
#include "server/transport/local/context.h"
#include "server/transport/local/ring.h"

namespace flashcore::server::local {

// Shared by its connection, the poller, and its requests in the engine; it is destroyed when nobody
// touches the ring any more. Thread-safe, but only the poller calls Poll and what is beside it.
class Session final : public std::enable_shared_from_this<Session> {
 public:
  // `broken`: called at most once, by Poll, when the client broke the protocol.
  // `gone`: called by the destructor.
  struct Callbacks {
    absl::AnyInvocable<void(const absl::Status&)> broken;
    absl::AnyInvocable<void()> gone;
  };

  Session(Context* context, Identity identity, std::shared_ptr<Regions> regions,
          std::unique_ptr<Ring> ring, Callbacks callbacks);
  ~Session();

  // Takes some of the requests that wait in the ring. Returns whether there was one.
  bool Poll();
  bool HasNews() const { return !ended_.load(std::memory_order_relaxed) && ring_->HasNews(); }
  void SetServerSleeps(bool sleeps) {
    if (!ended_.load(std::memory_order_relaxed)) ring_->SetServerSleeps(sleeps);
  }

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

  Context* const context_;
  const UseCount::Use use_;
  const Identity identity_;
  const std::shared_ptr<Regions> regions_;
  const std::unique_ptr<Ring> ring_;
  Callbacks callbacks_;
  std::atomic<bool> ended_{false};
  Mutex mutex_;
  std::vector<Request*> requests_ ABSL_GUARDED_BY(mutex_);  // in the engine
  // Memory of ended requests: malloc is slow for what its thread caches do not hold.
  std::vector<void*> free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_SESSION_H_
