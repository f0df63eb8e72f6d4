// Replies that are ready and that gRPC has not sent yet: their memory, and how long they wait.
#ifndef FLASHCORE_SERVER_TRANSPORT_UNSENT_REPLIES_H_
#define FLASHCORE_SERVER_TRANSPORT_UNSENT_REPLIES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/server_context.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/base/periodic_thread.h"

namespace flashcore::server {

class UnsentReplies;

// What gRPC and this server keep for an unsent reply, without its message: of an RPC, and of one
// answer of a stream (measured: 18 KB and 5 KB).
inline constexpr size_t kRpcBytes = 20480;
inline constexpr size_t kAnswerBytes = 6144;

// Why a reply did not reach its client.
enum class CutOff : uint8_t { kNo, kTimeout, kDrain };

// One reply of an RPC, from Ready to Sent. The reactor that sends the reply owns it. Not
// thread-safe.
class UnsentReply {
 public:
  // `all` and `context` outlive it. Null `context`: the reply is not gRPC's. Then its sender looks
  // for replies that wait too long.
  UnsentReply(UnsentReplies* all, grpc::ServerContextBase* context)
      : all_(all), context_(context) {}
  ~UnsentReply() { Sent(); }
  UnsentReply(const UnsentReply&) = delete;
  UnsentReply& operator=(const UnsentReply&) = delete;

  // The reply is ready, and takes `bytes` of memory other than staging memory, which is charged to
  // `client`. Call it at most once, before gRPC has the reply.
  void Ready(absl::string_view client, size_t bytes);
  // gRPC has sent the reply or dropped it. Returns whether the RPC was cut off meanwhile. Waits
  // while that happens. Further calls have no effect.
  CutOff Sent();

 private:
  friend class UnsentReplies;
  using Accounts = std::map<std::string, size_t, std::less<>>;

  UnsentReplies* const all_;
  grpc::ServerContextBase* const context_;
  // Guarded by the mutex of `all_`.
  Accounts::iterator account_;
  size_t bytes_ = 0;  // 0: not between Ready and Sent
  TimePoint deadline_;
  CutOff cut_off_ = CutOff::kNo;
  UnsentReply* previous_ = nullptr;
  UnsentReply* next_ = nullptr;
};

// All unsent replies of a server. A reply that is not sent in time ends its RPC. Thread-safe.
class UnsentReplies {
 public:
  struct Options {
    size_t total_bytes = 0;   // of all clients; 0: no limit
    size_t client_bytes = 0;  // of one client; 0: no limit
    Nanoseconds timeout{0};   // from Ready to Sent; 0: none
  };

  UnsentReplies() = default;
  UnsentReplies(const UnsentReplies&) = delete;
  UnsentReplies& operator=(const UnsentReplies&) = delete;

  // Call it once, before the first reply. `clock` outlives this.
  void Start(const Options& options, const Clock* clock);

  // RESOURCE_EXHAUSTED if the client, or all clients together, leave too much unread for one more
  // request.
  absl::Status Check(absl::string_view client) const ABSL_LOCKS_EXCLUDED(mutex_);

  // Cuts off every RPC with an unsent reply.
  void CutOffAll() ABSL_LOCKS_EXCLUDED(mutex_);

  const Options& options() const { return options_; }
  size_t bytes() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class UnsentReply;
  using Accounts = UnsentReply::Accounts;

  void Ready(UnsentReply* reply, absl::string_view client, size_t bytes)
      ABSL_LOCKS_EXCLUDED(mutex_);
  CutOff Sent(UnsentReply* reply) ABSL_LOCKS_EXCLUDED(mutex_);
  void Unlink(UnsentReply* reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Cancels the RPC of the oldest reply. Releases the mutex meanwhile.
  void CutOffOldest(CutOff why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CutOffLate() ABSL_LOCKS_EXCLUDED(mutex_);

  Options options_;
  const Clock* clock_ = nullptr;
  mutable Mutex mutex_;
  CondVar changed_;
  Accounts accounts_ ABSL_GUARDED_BY(mutex_);  // unsent bytes by client; some are 0
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Replies whose RPC was not cut off, by deadline.
  UnsentReply* oldest_ ABSL_GUARDED_BY(mutex_) = nullptr;
  UnsentReply* newest_ ABSL_GUARDED_BY(mutex_) = nullptr;
  // The reply whose RPC is being cancelled, by this thread. gRPC may end the RPC within that call,
  // on that thread or on another one.
  UnsentReply* cutting_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::thread::id cutter_ ABSL_GUARDED_BY(mutex_);
  std::optional<PeriodicThread> thread_;  // last: it uses the others
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_UNSENT_REPLIES_H_
