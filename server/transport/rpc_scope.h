// Counts, times and logs every RPC, on success and on failure, in one place.
#ifndef FLASHCORE_SERVER_TRANSPORT_RPC_SCOPE_H_
#define FLASHCORE_SERVER_TRANSPORT_RPC_SCOPE_H_

#include <atomic>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/descriptor.h"
#include "proto/grpc_compat.h"
#include "server/base/clock.h"
#include "server/telemetry/metrics.h"
#include "server/transport/authenticator.h"

namespace flashcore::server {

// The methods of a service, as the metrics label them.
std::vector<RpcMethod> MethodsOf(const google::protobuf::ServiceDescriptor& service);

// Shared by all RPCs of one server. Thread-safe.
struct RpcContext {
  Metrics* metrics = nullptr;
  const Clock* clock = nullptr;
  Authenticator authenticator;
  std::atomic<bool> draining{false};                    // new requests get UNAVAILABLE
  std::atomic<int> admitted_rpcs{0};                    // begun before the drain and not yet ended
  std::atomic<TimePoint> last_event{TimePoint::min()};  // when an RPC last began or ended
};

// OK, or UNAVAILABLE if the server is draining.
absl::Status CheckNotDraining(const RpcContext& context);

// One RPC: counts its start at construction and its end at destruction.
class RpcScope {
 public:
  RpcScope(RpcContext* context, RpcMetrics* rpc);
  ~RpcScope();
  RpcScope(const RpcScope&) = delete;
  RpcScope& operator=(const RpcScope&) = delete;

  void set_status(absl::StatusCode code) { code_ = code; }  // as sent to the client

 private:
  RpcContext* const context_;
  RpcMetrics* const rpc_;
  const TimePoint start_;
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
  // The answer has been handed to gRPC, or never will be. Call exactly once.
  void Record(absl::string_view request_id);

 private:
  RpcContext* const context_;
  RpcMetrics* const rpc_;
  const TimePoint start_;
  TimePoint replying_;
  absl::Status status_;
};

// Base of all unary RPCs. Deletes itself when the RPC has ended.
class UnaryReactor : public grpc_compat::InlineServerUnaryReactor {
 public:
  UnaryReactor(RpcContext* context, RpcMetrics* rpc) : rpc_(context, rpc), request_(context, rpc) {}

  // Ends the RPC. Call exactly once, from any thread; `this` may be gone on return.
  void End(const absl::Status& status);

 private:
  void OnDone() final;
  virtual absl::string_view request_id() const { return ""; }

  RpcScope rpc_;
  RequestScope request_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_RPC_SCOPE_H_
