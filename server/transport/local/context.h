// What everything behind the local socket has in common.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_CONTEXT_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_CONTEXT_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/strings/string_view.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/base/socket.h"
#include "server/sharing/call_room.h"
#include "server/sharing/fair_jobs.h"
#include "server/sharing/shares.h"
#include "server/transport/rpc/attention_methods.h"
#include "server/transport/rpc/passed_files.h"

namespace flashcore::server::local {

class Connection;
class RingPoller;

// Counts what is in use, so that an owner can wait for its end. Thread-safe.
class UseCount {
 public:
  class Use {
   public:
    explicit Use(UseCount* count) : count_(count) {
      MutexLock lock(&count_->mutex_);
      ++count_->uses_;
    }
    ~Use() {
      MutexLock lock(&count_->mutex_);
      if (--count_->uses_ == 0) count_->none_.NotifyAll();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    UseCount* const count_;
  };

  void WaitForNone() {
    MutexLock lock(&mutex_);
    while (uses_ > 0) none_.Wait(&mutex_);
  }

 private:
  Mutex mutex_;
  CondVar none_;
  int uses_ ABSL_GUARDED_BY(mutex_) = 0;
};

struct Options {
  std::string path;  // of the socket; empty: there is none
  UnixSocketAccess access;
  Shares::Limits connections{/*all=*/1024, /*one=*/256};
  int max_calls = 256;  // unanswered ones of one connection
  Nanoseconds hello_within = std::chrono::seconds(10);
  Shares::Limits received_bytes;  // of frames that have not completely arrived
  Shares::Limits call_bytes;      // of unanswered calls
  // The socket will never accept again. On the thread of the connections.
  std::function<void(const std::string& address)> on_dead;
};

// Outlives all connections, rings and calls.
struct Context {
  using OnConnection = absl::AnyInvocable<void(Connection*)>;

  RpcMetrics* Rpc(const char* method) const { return methods->Rpc(method, "local"); }
  Metrics& metrics() const { return *methods->context()->metrics; }

  AttentionMethods* methods = nullptr;
  RingPoller* poller = nullptr;
  // Runs `action` on the thread of the connections, in the client's turn, unless the connection has
  // ended by then. From any thread.
  absl::AnyInvocable<void(absl::string_view client, std::weak_ptr<Connection>, OnConnection action)
                         const>
      post;
  PassedFiles* passed_files = nullptr;
  CallRoom* room = nullptr;
  FairJobs* long_calls = nullptr;  // by client; those that may take milliseconds
  FairJobs* slow = nullptr;        // by client; for work that takes long, such as to map memory
  UseCount uses;                   // rings and calls
  RpcMetrics* attend = nullptr;
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_CONTEXT_H_
