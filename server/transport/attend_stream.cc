#include "server/transport/attend_stream.h"

#include <utility>

#include "server/transport/message.h"

namespace flashcore::server {

AttendStreamReactor::AttendStreamReactor(Fleet* fleet, const SharedMemory* memory,
                                         RpcContext* context, RpcMetrics* rpc, StreamSet* set,
                                         int max_inflight, const absl::StatusOr<Identity>& identity,
                                         TimePoint deadline)
    : StreamReactor(set, context, rpc, identity),
      fleet_(fleet),
      memory_(memory),
      max_inflight_(static_cast<size_t>(max_inflight)),
      deadline_(deadline) {
  Begin();
}

void AttendStreamReactor::OnReadDone(bool ok) {
  Request* request = nullptr;
  {
    MutexLock lock(&mutex_);
    reading_ = false;
    // Not ok: the client has half-closed, or is gone. If the stream is ending already, its status
    // answers this message.
    if (!ok && !end_.has_value()) end_ = absl::OkStatus();
    receiving_ = !end_.has_value();
    if (!receiving_) {
      Advance();
      return;
    }
    auto owned = std::make_unique<Request>(fleet_, context_, rpc_, &incoming_);
    request = owned.get();
    inflight_.emplace(request, std::move(owned));
  }
  Receive(request);
}

void AttendStreamReactor::Receive(Request* request) {
  AttendOperation* operation = &request->operation;
  operation->identity = identity_;
  operation->deadline = deadline_;
  operation->done = [this, request](const absl::Status& result) { Complete(request, result); };
  bool well_formed = false;
  absl::Status status =
      ParseAttend(incoming_, memory_, operation, &request->receiver.tensors, &well_formed);
  if (status.ok() && operation->request.request_id.empty()) {
    status = absl::InvalidArgumentError("request_id: empty; AttendStream needs one");
  }
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
  MutexLock lock(&mutex_);
  auto entry = inflight_.find(request);
  answers_.push_back(std::move(entry->second));
  inflight_.erase(entry);
  Advance();
}

void AttendStreamReactor::Advance() {
  if (finished_) return;
  if (cancelled_ && !writing_) DropAnswers();
  if (!writing_ && !answers_.empty()) {
    writing_ = true;
    StartWrite(&answers_.front()->answer);
  }
  const size_t unanswered = inflight_.size() + answers_.size();
  if (!end_.has_value() && !reading_ && !receiving_ && unanswered < max_inflight_) {
    reading_ = true;
    StartRead(&incoming_);
  }
  if (end_.has_value() && !receiving_ && unanswered == 0) End(*end_);
}

void AttendStreamReactor::DropAnswers() {
  for (auto& request : answers_) request->scope.Record(request->operation.request.request_id);
  answers_.clear();
}

void AttendStreamReactor::OnWriteDone(bool /*ok*/) {
  MutexLock lock(&mutex_);
  writing_ = false;
  answers_.front()->scope.Record(answers_.front()->operation.request.request_id);
  answers_.pop_front();
  Advance();
}

void AttendStreamReactor::OnCancel() {
  MutexLock lock(&mutex_);
  cancelled_ = true;
  for (auto& [request, owned] : inflight_) request->operation.Cancel();
  StopReadingLocked(absl::CancelledError("cancelled by the client"));
}

}  // namespace flashcore::server
