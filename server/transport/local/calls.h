// RPCs of AttentionService that come as LocalCalls.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_CALLS_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_CALLS_H_

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "flashcore/v1/attention.pb.h"
#include "server/base/clock.h"
#include "server/engine/client_lease.h"
#include "server/memory/regions.h"
#include "server/request/identity.h"
#include "server/transport/exchange.h"
#include "server/transport/local/context.h"
#include "server/transport/rpc_scope.h"

namespace flashcore::server::local {

// The methods that are answered at once.
class UnaryCalls {
 public:
  explicit UnaryCalls(Context* context);

  // Null if there is no such method. Else runs it and returns its status; with OK, `*response` is
  // the serialized message.
  using Run = std::function<absl::Status(const Identity& caller, absl::string_view request,
                                         std::string* response)>;
  const Run* Find(const std::string& method) const;

  // HoldLease: opens `*lease` unless it is open. A connection has one lease.
  absl::Status HoldLease(const Identity& caller, absl::string_view request, ClientLease* lease,
                         std::string* response) const;

 private:
  template <typename Request, typename Response>
  void Add(const char* name, AttentionMethods::Method<Request, Response> method);

  Context* const context_;
  RpcMetrics* const hold_lease_;
  std::unordered_map<std::string, Run> methods_;
};

// What a call needs of its connection, which may end before the call.
struct CallSetup {
  Context* context = nullptr;
  std::weak_ptr<Connection> connection;
  Identity identity;
  std::shared_ptr<Regions> regions;
  TimePoint deadline = kNoDeadline;
};

// A call with tensors: Attend, or LoadSequence with one chunk. Its functions are called on the
// connections' thread. Kept alive by the connection until it is answered, and by itself until it is
// complete.
class PendingCall : private UseCount::Use,  // first: what the others hold is released within it
                    public Exchange,
                    public std::enable_shared_from_this<PendingCall> {
 public:
  // Sends the reply, and lets go of the call. On the connections' thread.
  using Reply = absl::AnyInvocable<void(const absl::Status&, std::string message)>;

  // `method`: "Attend" or "LoadSequence"; null for another one.
  static std::shared_ptr<PendingCall> Make(const CallSetup& setup, const std::string& method,
                                           std::string message, Reply reply);
  void Start();

 protected:
  PendingCall(const CallSetup& setup, RpcMetrics* rpc, std::string message, Reply reply);

  const CallSetup setup_;

 private:
  virtual absl::Status Parse() = 0;
  // The serialized reply of a call that is complete.
  virtual absl::StatusOr<std::string> Encode() = 0;

  void Complete(const absl::Status& status) final;

  RpcScope rpc_;
  Reply reply_;
  std::shared_ptr<PendingCall> self_;  // from Start to Complete
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_CALLS_H_
