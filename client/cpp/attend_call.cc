#include "client/cpp/attend_call.h"

namespace flashcore {

namespace client {

absl::Status CallAttend(const Connection& connection, const AttendRequest& request,
                        AttendResult* result, const CallOptions& call) {
  if (absl::Status status = connection.CheckProcess(); !status.ok()) return status;
  const CallOptions whole = {connection.Deadline(call), call.affinity};  // of all attempts together
  AttendResult ignored;
  if (result == nullptr) result = &ignored;
  result->request_id.clear();  // keeps the memory of a result that is used again
  result->sequence_lengths.clear();
  result->timing = {};
  result->request_bytes = result->response_bytes = 0;
  if (absl::Status status = CheckRequest(request); !status.ok()) return status;
  int attempts = 0;
  const absl::Status status =
      connection.WithRetries(request.SafeToRepeat(), *whole.deadline, &attempts,
                             [&] { return connection.transport().Attend(request, whole, result); });
  result->attempts = attempts;
  return status;
}

absl::StatusOr<std::unique_ptr<Attempts>> MakeAttempts(const Connection& connection,
                                                       const AttendRequest& request,
                                                       const CallOptions& call) {
  if (absl::Status status = connection.CheckProcess(); !status.ok()) return status;
  if (absl::Status status = CheckRequest(request); !status.ok()) return status;
  return connection.transport().MakeAttempts(request, call);
}

absl::StatusOr<std::unique_ptr<Attempts>> MakeCudaStreamAttempt(const Connection& connection,
                                                                const AttendRequest& request,
                                                                void* stream,
                                                                const CallOptions& call) {
  if (absl::Status status = connection.CheckProcess(); !status.ok()) return status;
  if (absl::Status status = CheckRequest(request); !status.ok()) return status;
  return connection.transport().MakeCudaStreamAttempt(request, stream, call);
}

}  // namespace client

void AttendCall::Start() {
  bool cancelled = false;
  std::unique_ptr<grpc::Alarm> fired;  // owns its callback, which owns this call
  {
    absl::MutexLock lock(&mutex_);
    fired = std::move(alarm_);
    cancelled = cancelled_;
  }
  if (cancelled) return End(absl::CancelledError("cancelled between two attempts"), {});
  ++attempts_;
  args_.attempts->Start([self = shared_from_this()](absl::Status status, AttendResult result) {
    self->OnAttemptDone(std::move(status), std::move(result));
  });
}

void AttendCall::Cancel() {
  if (!args_.connection->OfThisProcess()) return;
  absl::MutexLock lock(&mutex_);
  cancelled_ = true;
  args_.attempts->Cancel();
  if (alarm_ != nullptr) alarm_->Cancel();
}

void AttendCall::OnAttemptDone(absl::Status status, AttendResult result) {
  if (Retry(status)) return;
  End(std::move(status), std::move(result));
}

void AttendCall::End(absl::Status status, AttendResult result) {
  result.request_bytes = args_.attempts->request_bytes();
  result.attempts = attempts_;
  args_.done(args_.connection->transport().ExplainDeadline(std::move(status), begin_),
             std::move(result));
}

bool AttendCall::Retry(const absl::Status& status) {
  const std::optional<absl::Duration> wait =
      args_.connection->Backoff(status, args_.safe_to_repeat, attempts_, args_.deadline);
  if (!wait.has_value()) return false;
  absl::MutexLock lock(&mutex_);
  alarm_ = std::make_unique<grpc::Alarm>();
  // Runs on another thread, with false if the alarm was cancelled; Start looks at cancelled_
  // itself.
  alarm_->Set(absl::ToChronoTime(absl::Now() + (cancelled_ ? absl::ZeroDuration() : *wait)),
              [self = shared_from_this()](bool) { self->Start(); });
  return true;
}

}  // namespace flashcore
