#include "server/transport/attend_stream.h"

#include <utility>

#include "server/transport/message.h"

namespace flashcore::server {

AttendStreamReactor::AttendStreamReactor(Fleet* fleet, RpcContext* context, RpcMetrics* rpc,
                                         StreamSet* set, int max_inflight,
                                         grpc::ServerContextBase* call, TimePoint deadline)
    : StreamReactor(set, context, rpc, call),
      fleet_(fleet),
      max_inflight_(static_cast<size_t>(max_inflight)),
      deadline_(deadline) {
  Begin();
}

void AttendStreamReactor::OnReadDone(bool ok) {
  Request* request = nullptr;
  absl::Status refusal;
  {
    MutexLock lock(&mutex_);
    reading_ = false;
    half_closed_ = !ok;  // or the client is gone
    if (!ok && !end_.has_value()) end_ = absl::OkStatus();
    if (!ok || (end_.has_value() && !Refuses())) {
      Advance();
      return;
    }
    if (!end_.has_value()) {
      refusal = context_->unsent.Check(identity_.name);
      if (!refusal.ok()) end_ = refusal;  // the client does not read: its answers would pile up
    } else {
      refusal = *end_;
    }
    receiving_ = true;
    auto owned = std::make_unique<Request>(fleet_, context_, rpc_, &incoming_, call_);
    request = owned.get();
    inflight_.emplace(request, std::move(owned));
  }
  Receive(request, refusal);
}

void AttendStreamReactor::Receive(Request* request, const absl::Status& refusal) {
  AttendOperation* operation = &request->operation;
  operation->identity = identity_;
  operation->deadline = deadline_;
  operation->done = [this, request](const absl::Status& result) { Complete(request, result); };
  bool well_formed = false;
  absl::Status status = ParseAttend(incoming_, /*regions=*/nullptr, operation,
                                    &request->receiver.tensors, &well_formed);
  if (status.ok() && operation->request.request_id.empty()) {
    status = absl::InvalidArgumentError("request_id: empty; AttendStream needs one");
  }
  if (well_formed && !refusal.ok()) status = refusal;
  if (!well_formed) {
    MutexLock lock(&mutex_);
    // After a malformed message, nothing on the stream can be trusted.
    if (!end_.has_value()) end_ = status;
  }
  request->receiver.Receive(
      status, [this, request](const absl::Status& received) { Enqueue(request, received); });
}

void AttendStreamReactor::Enqueue(Request* request, absl::Status received) {
  if (received.ok()) received = fleet_->Enqueue(&request->operation);
  if (!received.ok()) Complete(request, received);
  MutexLock lock(&mutex_);
  receiving_ = false;
  Advance();
}

void AttendStreamReactor::Complete(Request* request, const absl::Status& status) {
  request->answer = status.ok() ? EncodeReply(&request->operation)
                                : EncodeError(request->operation.request.request_id, status);
  request->scope.Replying(status);
  const size_t staged_bytes = status.ok() ? StagedReplyBytes(request->operation) : 0;
  request->unsent.Ready(identity_.name, kAnswerBytes + request->answer.Length() - staged_bytes);
  MutexLock lock(&mutex_);
  auto entry = inflight_.find(request);
  answers_.push_back(std::move(entry->second));
  inflight_.erase(entry);
  Advance();
}

void AttendStreamReactor::Advance() {
  if (finished_) return;
  while (cancelled_ && !writing_ && !answers_.empty()) EndAnswer(/*sent=*/false);
  if (!writing_ && !answers_.empty()) {
    writing_ = true;
    StartWrite(&answers_.front()->answer);
  }
  const size_t unanswered = inflight_.size() + answers_.size();
  const bool reads = !end_.has_value() || (Refuses() && !half_closed_ && !inflight_.empty());
  if (reads && !reading_ && !receiving_ && unanswered < max_inflight_) {
    reading_ = true;
    StartRead(&incoming_);
  }
  if (end_.has_value() && !receiving_ && unanswered == 0) End(*end_);
}

void AttendStreamReactor::EndAnswer(bool sent) {
  Request& request = *answers_.front();
  const CutOff cut_off = request.unsent.Sent();
  if (!sent) request.scope.Lost(cut_off);
  request.scope.Record(identity_.name, request.operation.request.request_id);
  answers_.pop_front();
}

void AttendStreamReactor::OnWriteDone(bool ok) {
  MutexLock lock(&mutex_);
  writing_ = false;
  EndAnswer(ok);
  Advance();
}

void AttendStreamReactor::CancelRequests() {
  for (auto& [request, owned] : inflight_) request->operation.Cancel();
}

}  // namespace flashcore::server
