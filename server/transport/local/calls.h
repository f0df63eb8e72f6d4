// RPCs of AttentionService that come as LocalCalls.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_CALLS_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_CALLS_H_

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/clock.h"
#include "server/base/use_count.h"
#include "server/engine/client_lease.h"
#include "server/memory/regions.h"
#include "server/request/identity.h"
#include "server/sharing/call_room.h"
#include "server/sharing/fair_jobs.h"
#include "server/transport/rpc/attention_methods.h"
#include "server/transport/rpc/rpc_scope.h"

namespace flashcore::server::local {

// Used by all calls. It outlives them, as does all that it points to.
struct CallServices {
  AttentionMethods* methods = nullptr;
  CallRoom* room = nullptr;
  FairJobs* long_calls = nullptr;  // by client; those that may take milliseconds
  UseCount* uses = nullptr;        // calls and rings
};

// The part of a connection that a call needs. The connection may end before the call.
struct CallSetup {
  const CallServices* services = nullptr;
  Identity identity;
  std::shared_ptr<Regions> regions;
  TimePoint deadline = kNoDeadline;
};

// DEADLINE_EXCEEDED if a call has its turn after its deadline.
absl::Status CheckDeadline(const RpcContext& context, TimePoint deadline);

// A call that is answered after its turn. Kept alive by its connection until it is answered, and by
// whoever works on it.
class PendingCall : public std::enable_shared_from_this<PendingCall> {
 public:
  // Lets the connection send the reply, and let go of the call. From any thread.
  using Reply =
      absl::AnyInvocable<void(std::shared_ptr<PendingCall>, absl::StatusOr<std::string> message)>;

  PendingCall(const CallSetup& setup, size_t bytes, Reply reply);
  virtual ~PendingCall() = default;
  PendingCall(const PendingCall&) = delete;
  PendingCall& operator=(const PendingCall&) = delete;

  // In its turn. Once.
  virtual void Start() = 0;
  // From any thread.
  virtual void Cancel() = 0;

  // Calls Reply. Once, from any thread.
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
    std::function<absl::Status(const absl::Status& refused, const Identity& client,
                               absl::string_view request, std::string* response)>
        run;
    // A call of it, of kLong, kSteps or kTensors.
    std::function<std::shared_ptr<PendingCall>(const CallSetup& setup, std::string message,
                                               PendingCall::Reply reply)>
        make;
  };

  explicit MethodTable(AttentionMethods* methods);  // which outlive this

  // Null if there is no such method.
  const Method* Find(const std::string& method) const;

  // HoldLease: opens `*lease` unless it is open. A connection has one lease.
  absl::Status HoldLease(const Identity& client, absl::string_view request, ClientLease* lease,
                         std::string* response) const;

 private:
  template <typename Request, typename Response>
  void Add(const char* name, AttentionMethods::Kind kind,
           AttentionMethods::Method<Request, Response> method);
  template <typename Tensors>
  void AddTensors(const char* name);

  AttentionMethods* const methods_;
  RpcMetrics* const hold_lease_;
  std::unordered_map<std::string, Method> table_;  // by name
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_CALLS_H_
