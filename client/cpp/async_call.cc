#include "client/cpp/async_call.h"

#include "grpcpp/generic/generic_stub.h"

namespace flashcore {

void AsyncCall::Start() {
  grpc::ClientContext* context = nullptr;
  std::unique_ptr<grpc::Alarm> fired;  // it keeps its callback, and so this call, alive
  {
    absl::MutexLock lock(&mutex_);
    fired = std::move(alarm_);
    if (!cancelled_) {
      context_ = std::make_unique<grpc::ClientContext>();
      context_->set_deadline(absl::ToChronoTime(args_.deadline));
      context = context_.get();
    }
  }
  if (context == nullptr) {
    AttendResult result;
    result.request_bytes = args_.message.Length();
    result.attempts = attempts_;
    args_.done(absl::CancelledError("cancelled between two attempts"), std::move(result));
    return;
  }
  ++attempts_;
  reply_.Clear();
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(args_.channel);
  stub.UnaryCall(context, kAttendMethod, {}, &args_.message, &reply_,
                 [self = shared_from_this()](const grpc::Status& s) { self->OnAttemptDone(s); });
}

void AsyncCall::Cancel() {
  absl::MutexLock lock(&mutex_);
  cancelled_ = true;
  if (context_ != nullptr) context_->TryCancel();
  if (alarm_ != nullptr) alarm_->Cancel();
}

void AsyncCall::OnAttemptDone(const grpc::Status& grpc_status) {
  absl::Status status = client::FromGrpc(grpc_status);
  if (Retry(status)) return;
  AttendResult result;
  if (status.ok()) {
    absl::StatusOr<client::Answer> answer = client::ParseAnswer(reply_, args_.num_spans);
    status = answer.status();
    if (status.ok()) status = client::CopyTensors(reply_, *answer, args_.destination);
    if (status.ok()) result = std::move(answer->result);
  }
  result.request_bytes = args_.message.Length();
  result.attempts = attempts_;
  args_.done(std::move(status), std::move(result));
}

bool AsyncCall::Retry(const absl::Status& status) {
  const absl::Time now = absl::Now();
  absl::InsecureBitGen random;
  const std::optional<absl::Duration> wait = client::NextBackoff(
      args_.retry, status, args_.safe_to_repeat, attempts_, now, args_.deadline, random);
  if (!wait.has_value()) return false;
  absl::MutexLock lock(&mutex_);
  if (cancelled_) return false;
  alarm_ = std::make_unique<grpc::Alarm>();
  // Runs on another thread, with false if the alarm was cancelled; Start looks at cancelled_
  // itself.
  alarm_->Set(absl::ToChronoTime(now + *wait),
              [self = shared_from_this()](bool) { self->Start(); });
  return true;
}

}  // namespace flashcore
