// RPCs of AttentionService that come as LocalCalls.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_CALLS_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_CALLS_H_

#include <deque>
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
#include "server/memory/regions.h"
#include "server/request/identity.h"
#include "server/transport/load_chunks.h"
#include "server/transport/local/context.h"
#include "server/transport/rpc_scope.h"
#include "server/transport/tensor_receiver.h"

namespace flashcore::server {

// The methods that are answered at once.
class UnaryCalls {
 public:
  explicit UnaryCalls(LocalContext* context);

  // Null if there is no such method. Else runs it and returns its status; with OK, `*response` is
  // the serialized message.
  using Run = std::function<absl::Status(const Identity& caller, absl::string_view request,
                                         std::string* response)>;
  const Run* Find(const std::string& method) const;

 private:
  template <typename Request, typename Response>
  void Add(const char* name,
           absl::Status (AttentionMethods::*method)(const Identity&, const Request&, Response*)
               const);

  LocalContext* const context_;
  std::unordered_map<std::string, Run> methods_;
};

// A call that is answered later. Its functions are called on the connections' thread. Kept alive by
// the connection until it is answered, and by its request in the engine.
class PendingCall {
 public:
  // Sends the reply, and lets go of the call. On the connections' thread.
  using Reply = absl::AnyInvocable<void(const absl::Status&, std::string message)>;

  virtual ~PendingCall() = default;
  virtual void Cancel() = 0;
  // The next message; `more`: others follow, which only LoadSequence has.
  virtual void AddMessage(std::string message, bool more) = 0;
  // False: so much waits already that the connection should not be read.
  virtual bool TakesMore() const { return true; }
};

// What a call needs of its connection, which may end before the call.
struct CallSetup {
  LocalContext* context = nullptr;
  std::weak_ptr<Connection> connection;
  Identity identity;
  std::shared_ptr<Regions> regions;
  TimePoint deadline = kNoDeadline;
};

// AddMessage begins the work: one request for Attend; for LoadSequence one for each message, one at
// a time.
std::shared_ptr<PendingCall> MakeAttend(const CallSetup& setup, PendingCall::Reply reply);
std::shared_ptr<PendingCall> MakeLoad(const CallSetup& setup, PendingCall::Reply reply);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_CALLS_H_
