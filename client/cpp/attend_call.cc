#include "client/cpp/attend_call.h"

#include "client/cpp/answer.h"
#include "client/cpp/encode.h"
#include "client/cpp/grpc_status.h"
#include "client/cpp/local/link.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"

namespace flashcore {

namespace client {
namespace {

absl::Status AttendOverGrpc(const Connection& connection, const AttendRequest& request,
                            AttendResult* result, const CallOptions& whole, int* attempts) {
  BorrowedMemory borrowed;  // outlives the message
  const absl::StatusOr<EncodedRequest> encoded =
      EncodeRequest(request, connection.MaxMessageBytes(), &borrowed);
  if (!encoded.ok()) return encoded.status();
  grpc::ByteBuffer reply;
  absl::Status status = connection.WithRetries(
      request.SafeToRepeat(), *whole.deadline, attempts,
      [&] { return connection.CallBytes(kAttendMethod, whole, encoded->message, &reply); });
  if (status.ok()) status = TakeReply(reply, encoded->destination, result);
  result->request_bytes = encoded->message.Length();
  return status;
}

// Attempts over gRPC.
class GrpcAttempts final : public Attempts {
 public:
  GrpcAttempts(std::shared_ptr<const Connection> connection, EncodedRequest request,
               absl::Time deadline, std::string affinity)
      : connection_(std::move(connection)),
        request_(std::move(request)),
        deadline_(deadline),
        affinity_(std::move(affinity)) {}

  void Start(Done done) override ABSL_LOCKS_EXCLUDED(mutex_) {
    grpc::ClientContext* context = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      context_ = std::make_unique<grpc::ClientContext>();
      connection_->Prepare(deadline_, affinity_, context_.get());
      context = context_.get();
      if (cancelled_) context->TryCancel();
    }
    done_ = std::move(done);
    reply_.Clear();
    grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(
        connection_->callback_channel());
    stub.UnaryCall(context, kAttendMethod, {}, &request_.message, &reply_,
                   [this](const grpc::Status& status) { OnDone(FromGrpc(status)); });
  }

  void Cancel() override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
    if (context_ != nullptr) context_->TryCancel();
  }

  size_t request_bytes() const override { return request_.message.Length(); }

 private:
  void OnDone(absl::Status status) {
    AttendResult result;
    if (status.ok()) status = TakeReply(reply_, request_.destination, &result);
    const Done done = std::move(done_);  // may destroy this
    done(std::move(status), std::move(result));
  }

  const std::shared_ptr<const Connection> connection_;
  EncodedRequest request_;
  const absl::Time deadline_;
  const std::string affinity_;
  Done done_;  // of the attempt that runs, as is the next
  grpc::ByteBuffer reply_;
  absl::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<grpc::ClientContext> context_ ABSL_GUARDED_BY(mutex_);  // of the last attempt
};

}  // namespace

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
      connection.local() == nullptr
          ? AttendOverGrpc(connection, request, result, whole, &attempts)
          : connection.WithRetries(request.SafeToRepeat(), *whole.deadline, &attempts, [&] {
              return connection.local()->Attend(request, local::ToSteady(*whole.deadline), result);
            });
  result->attempts = attempts;
  return status;
}

absl::StatusOr<std::unique_ptr<Attempts>> MakeAttempts(
    const std::shared_ptr<const Connection>& connection, const AttendRequest& request,
    absl::Time deadline, const std::string& affinity) {
  if (absl::Status status = connection->CheckProcess(); !status.ok()) return status;
  if (absl::Status status = CheckRequest(request); !status.ok()) return status;
  if (connection->local() != nullptr) return MakeLocalAttempts(connection, request, deadline);
  absl::StatusOr<EncodedRequest> encoded = EncodeRequest(request, connection->MaxMessageBytes());
  if (!encoded.ok()) return encoded.status();
  return std::make_unique<GrpcAttempts>(connection, *std::move(encoded), deadline, affinity);
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
  args_.done(args_.connection->ExplainDeadline(std::move(status), begin_), std::move(result));
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
