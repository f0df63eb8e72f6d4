// Attend over gRPC: blocking, and with a callback.
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/answer.h"
#include "client/cpp/encode.h"
#include "client/cpp/grpc/transport.h"
#include "client/cpp/grpc_status.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"

namespace flashcore::client {
namespace {

constexpr char kAttendMethod[] = "/flashcore.v1.AttentionService/Attend";

// Attempts over gRPC.
class GrpcAttempts final : public Attempts {
 public:
  GrpcAttempts(std::shared_ptr<const GrpcTransport> transport, EncodedRequest request,
               absl::Time deadline, std::string affinity)
      : transport_(std::move(transport)),
        request_(std::move(request)),
        deadline_(deadline),
        affinity_(std::move(affinity)) {}

  void Start(Done done) override ABSL_LOCKS_EXCLUDED(mutex_) {
    grpc::ClientContext* context = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      context_ = std::make_unique<grpc::ClientContext>();
      transport_->Prepare(deadline_, affinity_, context_.get());
      context = context_.get();
      if (cancelled_) context->TryCancel();
    }
    done_ = std::move(done);
    reply_.Clear();
    grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(
        transport_->callback_channel());
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

  const std::shared_ptr<const GrpcTransport> transport_;
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

absl::Status GrpcTransport::Attend(const AttendRequest& request, const CallOptions& call,
                                   AttendResult* result) {
  BorrowedMemory borrowed;  // outlives the message
  const absl::StatusOr<EncodedRequest> encoded =
      EncodeRequest(request, MaxMessageBytes(), &borrowed);
  if (!encoded.ok()) return encoded.status();
  grpc::ByteBuffer reply;
  absl::Status status = CallBytes(kAttendMethod, call, encoded->message, &reply);
  if (status.ok()) status = TakeReply(reply, encoded->destination, result);
  result->request_bytes = encoded->message.Length();
  return status;
}

absl::StatusOr<std::unique_ptr<Attempts>> GrpcTransport::MakeAttempts(const AttendRequest& request,
                                                                      const CallOptions& call) {
  absl::StatusOr<EncodedRequest> encoded = EncodeRequest(request, MaxMessageBytes());
  if (!encoded.ok()) return encoded.status();
  return std::make_unique<GrpcAttempts>(shared_from_this(), *std::move(encoded), *call.deadline,
                                        call.affinity);
}

}  // namespace flashcore::client
