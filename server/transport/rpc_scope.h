// The one wrapper by which every RPC of ours is counted, timed and logged, on success and on
// failure.
#ifndef FLASHCORE_SERVER_TRANSPORT_RPC_SCOPE_H_
#define FLASHCORE_SERVER_TRANSPORT_RPC_SCOPE_H_

#include <atomic>
#include <string>

#include "absl/status/status.h"
#include "grpcpp/support/server_callback.h"
#include "server/base/clock.h"
#include "server/telemetry/metrics.h"

namespace flashcore::server {

// What the RPCs of one server share. Thread-safe.
struct RpcContext {
  Metrics* metrics = nullptr;
  const Clock* clock = nullptr;
  std::atomic<bool> draining{false};                    // new requests get UNAVAILABLE
  std::atomic<int> admitted_rpcs{0};                    // begun before the drain, and not ended
  std::atomic<TimePoint> last_event{TimePoint::min()};  // when one last began or ended
};

// OK, or UNAVAILABLE if the server is draining.
absl::Status CheckNotDraining(const RpcContext& context);

// One RPC: counts its start, and when destroyed its end.
class RpcScope {
 public:
  RpcScope(RpcContext* context, RpcMetrics* rpc);
  ~RpcScope();
  RpcScope(const RpcScope&) = delete;
  RpcScope& operator=(const RpcScope&) = delete;

  void set_status(absl::StatusCode code) { code_ = code; }  // the one that the client gets

 private:
  RpcContext* const context_;
  RpcMetrics* const rpc_;
  const TimePoint start_;
  const bool admitted_;
  absl::StatusCode code_ = absl::StatusCode::kUnknown;
};

// One request: a unary RPC, or a message of a stream and its answer. Counted as in flight from
// construction until Record.
class RequestScope {
 public:
  RequestScope(RpcContext* context, RpcMetrics* rpc);
  RequestScope(const RequestScope&) = delete;
  RequestScope& operator=(const RequestScope&) = delete;

  // The result is there and is about to be sent.
  void Replying(absl::Status status);
  // The answer is with the network, or will never be. Call exactly once.
  void Record(const std::string& request_id);

 private:
  RpcContext* const context_;
  RpcMetrics* const rpc_;
  const TimePoint start_;
  TimePoint replying_;
  absl::Status status_;
};

// A unary RPC of ours. Deletes itself when the RPC has ended.
class UnaryReactor : public grpc::ServerUnaryReactor {
 public:
  UnaryReactor(RpcContext* context, RpcMetrics* rpc) : rpc_(context, rpc), request_(context, rpc) {}

  // Ends the RPC. Call exactly once, from any thread; `this` may be gone on return.
  void End(const absl::Status& status);

 private:
  // Not meant for us by gRPC, but OnDone and OnCancel are short and never block; by default each
  // would wake another thread, once a request.
  bool InternalInlineable() final { return true; }
  void OnDone() final;
  virtual const std::string& request_id() const;

  RpcScope rpc_;
  RequestScope request_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_RPC_SCOPE_H_
