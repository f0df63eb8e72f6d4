// A request that carries tensors, from its message to its answer, whatever transport it came by.
#ifndef FLASHCORE_SERVER_TRANSPORT_RPC_EXCHANGE_H_
#define FLASHCORE_SERVER_TRANSPORT_RPC_EXCHANGE_H_

#include <memory>

#include "absl/status/status.h"
#include "server/base/clock.h"
#include "server/engine/fleet.h"
#include "server/kv/operation.h"
#include "server/memory/regions.h"
#include "server/request/request.h"
#include "server/transport/rpc/message.h"
#include "server/transport/rpc/rpc_scope.h"

namespace flashcore::server {

// The steps, in order:
//
//   parse     The transport parses the message, with ParseAttend or LoadChunks.
//   Receive   The operation is admitted. It waits for staging memory while that is full; meanwhile
//             the message stays where it is. Its tensors are copied once; then it is released.
//   Received  The operation waits until its inputs are ready, and is queued. A transport may hold
//             it back first.
//   Complete  The result is there: the transport answers. results_ready is raised, or will be when
//             inputs_ready is reached.
//   Record    The answer is sent.
//
// A refusal at any step leads to Complete, too: it is called exactly once, on a lane's thread or
// on that which refused, and may destroy the exchange. Calls on one exchange never overlap, except
// Cancel.
class Exchange {
 public:
  // The context of an exchange. All outlive it.
  struct Origin {
    Fleet* fleet = nullptr;
    RpcContext* context = nullptr;
    RpcMetrics* rpc = nullptr;
  };

  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Drops the request unless its launch has begun. Thread-safe.
  void Cancel() { operation_.Cancel(); }

 protected:
  // The message is received from now on.
  Exchange(const Origin& origin, RequestMessage message);
  virtual ~Exchange() = default;

  // `parsed` is the result of parsing, or why the request is refused without.
  void Receive(const absl::Status& parsed);
  // `status`: OK, or that of Receive or of Fleet::Admit.
  virtual void Received(const absl::Status& status);
  virtual void Complete(const absl::Status& status) = 0;
  void Enqueue();
  // Call it exactly once, after scope_.Replying.
  void Record() {
    scope_.Record(operation_.identity.name, operation_.request.request_id, operation_.deadline);
  }

  const Origin origin_;
  RequestMessage message_;
  AttendOperation operation_;
  TensorFields tensors_;             // the places of the tensors in the message
  std::weak_ptr<const void> owner_;  // of the memory of its points: it lives as the connection does
  RequestScope scope_;

 private:
  // Copies the tensors of an admitted operation.
  void Take(const absl::Status& admitted);
  void End(const absl::Status& status);  // calls Complete

  const TimePoint start_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_RPC_EXCHANGE_H_
