// HoldLease: a lease that lasts as long as its call.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_HOLD_LEASE_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_HOLD_LEASE_H_

#include "absl/base/thread_annotations.h"
#include "flashcore/v1/attention.pb.h"
#include "grpcpp/support/server_callback.h"
#include "server/engine/fleet.h"
#include "server/transport/grpc/stream_reactor.h"
#include "server/transport/rpc/rpc_scope.h"
#include "server/transport/rpc/unsent_replies.h"

namespace flashcore::server {

// The one reply is a request of its own, so that times and requests in flight do not count how long
// clients hold their leases. The call ends when the client ends it, when it is gone, or with its
// token; the lease ends then. A drain ends the call, but leaves the lease: requests on its
// sequences may still be queued.
class HoldLeaseReactor final
    : public StreamReactor<grpc::ServerWriteReactor<v1::HoldLeaseResponse>> {
 public:
  HoldLeaseReactor(Fleet* fleet, StreamSet* set, RpcContext* context, RpcMetrics* rpc,
                   grpc::ServerContextBase* call, const absl::Status& parsed);

  void OnWriteDone(bool ok) override;

 private:
  enum class State { kNew, kReplying, kReplied };

  void Advance() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Reply() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Fleet* const fleet_;
  RequestScope request_ ABSL_GUARDED_BY(mutex_);
  UnsentReply unsent_ ABSL_GUARDED_BY(mutex_);
  v1::HoldLeaseResponse response_ ABSL_GUARDED_BY(mutex_);
  State state_ ABSL_GUARDED_BY(mutex_) = State::kNew;
  ClientLease lease_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_HOLD_LEASE_H_
