// Counts, times and logs every RPC of either transport, on success and on failure, in one place.
#ifndef FLASHCORE_SERVER_TRANSPORT_RPC_RPC_SCOPE_H_
#define FLASHCORE_SERVER_TRANSPORT_RPC_RPC_SCOPE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/descriptor.h"
#include "server/access/authenticator.h"
#include "server/access/client_connections.h"
#include "server/base/clock.h"
#include "server/telemetry/metrics.h"
#include "server/transport/rpc/unsent_replies.h"

namespace flashcore::server {

// The methods of a service, as the metrics label them.
std::vector<RpcMethod> MethodsOf(const google::protobuf::ServiceDescriptor& service);

// Shared by all RPCs of one server. Thread-safe.
struct RpcContext {
  Metrics* metrics = nullptr;
  const Clock* clock = nullptr;
  Authenticator authenticator;
  ClientConnections* client_connections = nullptr;
  AlarmFactory make_alarm = nullptr;                    // for requests that wait for memory
  std::atomic<bool> draining{false};                    // new requests get UNAVAILABLE
  std::atomic<int> admitted_rpcs{0};                    // begun before the drain and not yet ended
  std::atomic<TimePoint> last_event{TimePoint::min()};  // when an RPC last began or ended
  UnsentReplies unsent{};
  size_t max_message_bytes = SIZE_MAX;  // over gRPC; set before the first RPC
};

// OK, or UNAVAILABLE if the server drains.
absl::Status CheckNotDraining(const RpcContext& context);

// OK, or why a request of `client` is refused at once: the server drains, or the client has too
// many replies that it does not read.
absl::Status Admit(const RpcContext& context, const Identity& client);

// OK, or RESOURCE_EXHAUSTED if a message has more bytes than the limit.
absl::Status CheckMessageBytes(const RpcContext& context, size_t bytes);

// One RPC: counts its start at construction and its end at destruction.
class RpcScope {
 public:
  // `connection`: of gRPC; null: it has ended, or the RPC came by the local socket.
  RpcScope(RpcContext* context, RpcMetrics* rpc,
           std::shared_ptr<ClientConnection> connection = nullptr);
  ~RpcScope();
  RpcScope(const RpcScope&) = delete;
  RpcScope& operator=(const RpcScope&) = delete;

  ClientConnection* connection() const { return call_.connection(); }
  void set_status(absl::StatusCode code) { code_ = code; }  // as sent to the client
  // The RPC was cancelled before everything was sent.
  void Cancelled() {
    if (code_ == absl::StatusCode::kOk) code_ = absl::StatusCode::kCancelled;
  }

 private:
  RpcContext* const context_;
  RpcMetrics* const rpc_;
  const ConnectionCall call_;
  const bool admitted_;
  absl::StatusCode code_ = absl::StatusCode::kUnknown;
};

// One request: a unary RPC, or one message of a stream with its answer. In flight from construction
// until Record.
class RequestScope {
 public:
  RequestScope(RpcContext* context, RpcMetrics* rpc);
  RequestScope(const RequestScope&) = delete;
  RequestScope& operator=(const RequestScope&) = delete;

  // The result is ready to be sent.
  void Replying(absl::Status status);
  // The answer did not reach the client.
  void Lost(CutOff why);
  // The answer has been handed to gRPC, or never will be. Call exactly once. `client`: the client's
  // name; empty if it is not known. A request that was cancelled after its `deadline` has expired:
  // clients cancel what they no longer wait for.
  void Record(absl::string_view client, absl::string_view request_id,
              TimePoint deadline = kNoDeadline);

 private:
  RpcContext* const context_;
  RpcMetrics* const rpc_;
  const TimePoint start_;
  TimePoint replying_;
  absl::Status status_;
  bool unread_ = false;  // the client did not read the answer
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_RPC_RPC_SCOPE_H_
