#include "client/cpp/attend_call.h"

#include "grpcpp/generic/generic_stub.h"

namespace flashcore {

namespace client {

absl::Status CallAttend(const Connection& connection, const AttendRequest& request,
                        AttendResult* result, const CallOptions& call) {
  const CallOptions whole = {connection.Deadline(call), call.affinity};  // of all attempts together
  BorrowedMemory borrowed;                                               // outlives the message
  const absl::StatusOr<EncodedRequest> encoded = connection.Encode(request, &borrowed);
  if (!encoded.ok()) return encoded.status();
  AttendResult ignored;
  if (result == nullptr) result = &ignored;
  *result = {};
  grpc::ByteBuffer reply;
  int attempts = 0;
  absl::Status status = connection.WithRetries(
      request.SafeToRepeat(), *whole.deadline, &attempts,
      [&] { return connection.CallBytes(kAttendMethod, whole, encoded->message, &reply); });
  if (status.ok()) status = TakeReply(reply, encoded->destination, result);
  result->attempts = attempts;
  result->request_bytes = encoded->message.Length();
  return status;
}

}  // namespace client

void AttendCall::Start() {
  grpc::ClientContext* context = nullptr;
  std::unique_ptr<grpc::Alarm> fired;  // owns its callback, which owns this call
  {
    absl::MutexLock lock(&mutex_);
    fired = std::move(alarm_);
    if (!cancelled_) {
      context_ = std::make_unique<grpc::ClientContext>();
      args_.connection->Prepare(args_.deadline, args_.affinity, context_.get());
      context = context_.get();
    }
  }
  if (context == nullptr) return End(absl::CancelledError("cancelled between two attempts"), {});
  ++attempts_;
  reply_.Clear();
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(
      args_.connection->callback_channel());
  stub.UnaryCall(context, kAttendMethod, {}, &args_.request.message, &reply_,
                 [self = shared_from_this()](const grpc::Status& s) { self->OnAttemptDone(s); });
}

void AttendCall::Cancel() {
  absl::MutexLock lock(&mutex_);
  cancelled_ = true;
  if (context_ != nullptr) context_->TryCancel();
  if (alarm_ != nullptr) alarm_->Cancel();
}

void AttendCall::OnAttemptDone(const grpc::Status& grpc_status) {
  absl::Status status = client::FromGrpc(grpc_status);
  if (Retry(status)) return;
  AttendResult result;
  if (status.ok()) status = client::TakeReply(reply_, args_.request.destination, &result);
  End(std::move(status), std::move(result));
}

void AttendCall::End(absl::Status status, AttendResult result) {
  result.request_bytes = args_.request.message.Length();
  result.attempts = attempts_;
  args_.done(std::move(status), std::move(result));
}

bool AttendCall::Retry(const absl::Status& status) {
  const std::optional<absl::Duration> wait =
      args_.connection->Backoff(status, args_.safe_to_repeat, attempts_, args_.deadline);
  if (!wait.has_value()) return false;
  absl::MutexLock lock(&mutex_);
  if (cancelled_) return false;
  alarm_ = std::make_unique<grpc::Alarm>();
  // Runs on another thread, with false if the alarm was cancelled; Start looks at cancelled_
  // itself.
  alarm_->Set(absl::ToChronoTime(absl::Now() + *wait),
              [self = shared_from_this()](bool) { self->Start(); });
  return true;
}

}  // namespace flashcore
