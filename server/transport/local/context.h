// What everything behind the local socket has in common.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_CONTEXT_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_CONTEXT_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/transport/attention_methods.h"
#include "server/transport/connection_count.h"

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
  std::string path;                    // of the socket; empty: there is none
  int max_connections_per_user = 256;  // of the local socket
  int max_calls = 256;                 // unanswered ones of one connection
  Nanoseconds hello_within = std::chrono::seconds(10);
  // The socket will never accept again. On the thread of the connections.
  std::function<void(const std::string& address)> on_dead;
};

// Outlives all connections, rings and calls.
struct Context {
  using OnConnection = absl::AnyInvocable<void(Connection*)>;

  RpcMetrics* Rpc(const char* method) const { return methods->Rpc(method, "local"); }
  Metrics& metrics() const { return *methods->context()->metrics; }

  AttentionMethods* methods = nullptr;
  ConnectionCount* connections = nullptr;
  RingPoller* poller = nullptr;
  // Runs `action` on the thread of the connections, unless the connection has ended by then. From
  // any thread.
  absl::AnyInvocable<void(std::weak_ptr<Connection>, OnConnection action) const> post;
  // Runs `job` on a thread for work that takes milliseconds, such as to map memory.
  absl::AnyInvocable<void(absl::AnyInvocable<void()> job) const> run_slow;
  UseCount uses;  // rings and calls
  RpcMetrics* attend = nullptr;
  RpcMetrics* load_sequence = nullptr;
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_CONTEXT_H_
