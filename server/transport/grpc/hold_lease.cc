#include "server/transport/grpc/hold_lease.h"

namespace flashcore::server {

HoldLeaseReactor::HoldLeaseReactor(Fleet* fleet, StreamSet* set, RpcContext* context,
                                   RpcMetrics* rpc, grpc::ServerContextBase* call,
                                   const absl::Status& parsed)
    : StreamReactor(set, context, rpc, call),
      fleet_(fleet),
      request_(context, rpc),
      unsent_(&context->unsent, CancelRpc(call, connection())) {
  if (!parsed.ok()) {
    MutexLock lock(&mutex_);
    if (!end_.has_value()) end_ = parsed;
  }
  Begin();
}

void HoldLeaseReactor::Advance() {
  if (finished_) return;
  if (state_ == State::kNew) {
    if (!end_.has_value()) return Reply();
    request_.Replying(*end_);
    request_.Record(identity_.name, "");
    state_ = State::kReplied;
  }
  if (!end_.has_value()) return;
  if (absl::IsUnavailable(*end_)) {
    lease_.Abandon();
  } else {
    lease_.End();
  }
  if (state_ == State::kReplied) End(*end_);
}

void HoldLeaseReactor::Reply() {
  lease_ = fleet_->OpenLease(identity_);
  response_.set_lease_id(lease_.id().ToBytes());
  request_.Replying(absl::OkStatus());
  unsent_.Ready(identity_.name, kAnswerBytes);
  state_ = State::kReplying;
  StartWrite(&response_);
}

void HoldLeaseReactor::OnWriteDone(bool ok) {
  MutexLock lock(&mutex_);
  const CutOff cut_off = unsent_.Sent();
  if (!ok) request_.Lost(cut_off);
  request_.Record(identity_.name, "");
  state_ = State::kReplied;
  Advance();
}

}  // namespace flashcore::server
