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
#include "server/base/clock.h"
#include "server/engine/client_lease.h"
#include "server/memory/regions.h"
#include "server/request/identity.h"
#include "server/sharing/call_room.h"
#include "server/transport/local/context.h"
#include "server/transport/rpc/attention_methods.h"
#include "server/transport/rpc/rpc_scope.h"

namespace flashcore::server::local {

// What a call needs of its connection, which may end before the call.
struct CallSetup {
  Context* context = nullptr;
  std::weak_ptr<Connection> connection;
  Identity identity;
  std::shared_ptr<Regions> regions;
  TimePoint deadline = kNoDeadline;
};

// DEADLINE_EXCEEDED if a call has its turn after its deadline.
absl::Status CheckDeadline(const Context& context, TimePoint deadline);

// A call that is answered after its turn. Kept alive by its connection until it is answered, and by
// whoever works on it.
class PendingCall : public std::enable_shared_from_this<PendingCall> {
 public:
  // Sends the reply, and lets go of the call. On the connections' thread.
  using Reply = absl::AnyInvocable<void(const absl::Status&, std::string message)>;

  PendingCall(const CallSetup& setup, size_t bytes, Reply reply);
  virtual ~PendingCall() = default;
  PendingCall(const PendingCall&) = delete;
  PendingCall& operator=(const PendingCall&) = delete;

  // In its turn. Once.
  virtual void Start() = 0;
  // From any thread.
  virtual void Cancel() = 0;

  // Lets the connection reply. Once, from any thread.
  void Answer(absl::StatusOr<std::string> message);

 protected:
  const UseCount::Use use_;  // first: what the others hold is released within it
  const CallSetup setup_;

 private:
  const CallRoom::Charge charge_;
  Reply reply_;
};

// The methods of the local socket. Thread-safe.
class MethodTable {
 public:
  struct Method {
    AttentionMethods::Kind kind = AttentionMethods::Kind::kQuick;
    // Runs it and returns its status, or `refused`; with OK, `*response` is the serialized message.
    // Null unless AttentionMethods has it.
    std::function<absl::Status(const absl::Status& refused, const Identity& caller,
                               absl::string_view request, std::string* response)>
        run;
    // A call of it, of kLong, kSteps or kTensors.
    std::function<std::shared_ptr<PendingCall>(const CallSetup& setup, std::string message,
                                               PendingCall::Reply reply)>
        make;
  };

  explicit MethodTable(Context* context);

  // Null if there is no such method.
  const Method* Find(const std::string& method) const;

  // HoldLease: opens `*lease` unless it is open. A connection has one lease.
  absl::Status HoldLease(const Identity& caller, absl::string_view request, ClientLease* lease,
                         std::string* response) const;

 private:
  template <typename Request, typename Response>
  void Add(const char* name, AttentionMethods::Kind kind,
           AttentionMethods::Method<Request, Response> method);
  template <typename Tensors>
  void AddTensors(const char* name);

  Context* const context_;
  RpcMetrics* const hold_lease_;
  std::unordered_map<std::string, Method> methods_;
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_CALLS_H_
