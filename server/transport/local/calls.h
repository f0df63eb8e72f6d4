// RPCs of AttentionService that come as LocalCalls.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_CALLS_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_CALLS_H_

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "flashcore/v1/attention.pb.h"
#include "server/base/clock.h"
#include "server/base/use_count.h"
#include "server/engine/client_lease.h"
#include "server/memory/regions.h"
#include "server/request/identity.h"
#include "server/sharing/call_room.h"
#include "server/sharing/fair_jobs.h"
#include "server/transport/rpc/attention_methods.h"
#include "server/transport/rpc/exchange.h"
#include "server/transport/rpc/rpc_scope.h"

namespace flashcore::server::local {

// The methods that need no device. Thread-safe.
class UnaryCalls {
 public:
  explicit UnaryCalls(AttentionMethods* methods);  // which outlive this

  // Null if there is no such method. Else runs it and returns its status, or `refused`; with OK,
  // `*response` is the serialized message.
  using Run = std::function<absl::Status(const absl::Status& refused, const Identity& caller,
                                         absl::string_view request, std::string* response)>;
  const Run* Find(const std::string& method) const;

  // HoldLease: opens `*lease` unless it is open. A connection has one lease.
  absl::Status HoldLease(const Identity& caller, absl::string_view request, ClientLease* lease,
                         std::string* response) const;

 private:
  template <typename Request, typename Response>
  void Add(const char* name, AttentionMethods::Method<Request, Response> method);

  AttentionMethods* const methods_;
  RpcMetrics* const hold_lease_;
  std::unordered_map<std::string, Run> runs_;  // by method
};

// What all calls use. It outlives them, as does what it points to.
struct CallServices {
  AttentionMethods* methods = nullptr;
  CallRoom* room = nullptr;
  FairJobs* long_calls = nullptr;  // by client; those that may take milliseconds
  UseCount* uses = nullptr;        // calls with tensors, and rings
  Exchange::Origin attend;
  Exchange::Origin load_sequence;
  RpcMetrics* manage_sequences = nullptr;
};

// What a call needs of its connection, which may end before the call.
struct CallSetup {
  const CallServices* services = nullptr;
  Identity identity;
  std::shared_ptr<Regions> regions;
  TimePoint deadline = kNoDeadline;
};

// DEADLINE_EXCEEDED if a call has its turn after its deadline.
absl::Status CheckDeadline(const RpcContext& context, TimePoint deadline);

// A call that is answered after its turn. Kept alive by its connection until it is
// answered, and by whoever works on it.
class PendingCall {
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

 protected:
  // `self` is this.
  void Answer(std::shared_ptr<PendingCall> self, absl::StatusOr<std::string> message);

  const CallSetup setup_;

 private:
  const CallRoom::Charge charge_;
  Reply reply_;
};

// A call of `run`, which outlives it.
class UnaryCall final : public PendingCall, public std::enable_shared_from_this<UnaryCall> {
 public:
  UnaryCall(const CallSetup& setup, const UnaryCalls::Run* run, std::string message, Reply reply)
      : PendingCall(setup, message.size(), std::move(reply)),
        run_(run),
        message_(std::move(message)) {}

  void Start() override;
  void Cancel() override { cancelled_ = true; }

 private:
  const UnaryCalls::Run* const run_;
  const std::string message_;
  std::atomic<bool> cancelled_{false};
};

// ManageSequences: one operation in each turn, since one may take milliseconds and there may be
// many. Its client's other calls come in between, too. A call that has begun runs to its end.
class ManageCall final : public PendingCall, public std::enable_shared_from_this<ManageCall> {
 public:
  ManageCall(const CallSetup& setup, std::string message, Reply reply);

  void Start() override;
  void Cancel() override { cancelled_ = true; }

 private:
  absl::Status Begin();
  void RunNext();  // and lets the rest have its turn
  void Finish(const absl::Status& status);

  const std::string message_;
  std::atomic<bool> cancelled_{false};
  std::optional<RpcScope> rpc_;
  std::optional<RequestScope> scope_;
  v1::ManageSequencesRequest request_;
  v1::ManageSequencesResponse response_;
  AttentionMethods::Operations operations_;
};

// A call with tensors: Attend, or LoadSequence with one chunk. Kept alive by itself, too, until it
// is complete.
class TensorCall : private UseCount::Use,  // first: what the others hold is released within it
                   public PendingCall,
                   public Exchange,
                   public std::enable_shared_from_this<TensorCall> {
 public:
  // `method`: "Attend" or "LoadSequence"; null for another one.
  static std::shared_ptr<TensorCall> Make(const CallSetup& setup, const std::string& method,
                                          std::string message, Reply reply);
  void Start() override;
  void Cancel() override { Exchange::Cancel(); }

 protected:
  TensorCall(const CallSetup& setup, const Exchange::Origin& origin, std::string message,
             Reply reply);

 private:
  virtual absl::Status Parse() = 0;
  // The serialized reply of a call that is complete.
  virtual absl::StatusOr<std::string> Encode() = 0;

  void Complete(const absl::Status& status) final;

  RpcScope rpc_;
  std::shared_ptr<TensorCall> self_;  // from Start to Complete
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_CALLS_H_
