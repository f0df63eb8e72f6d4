// A lease over gRPC: an open HoldLease.
#include <memory>
#include <string>
#include <utility>

#include "client/cpp/grpc/transport.h"
#include "client/cpp/grpc_status.h"
#include "flashcore/v1/attention.grpc.pb.h"
#include "grpcpp/client_context.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/support/async_stream.h"

namespace flashcore::client {
namespace {

absl::Status TooLate() { return absl::DeadlineExceededError("the server did not answer in time"); }

// An open HoldLease. No thread waits for its end: one that waits in gRPC polls all sockets of the
// process, and slows down blocking calls (channel.cc). Other calls, and gRPC's own poller every few
// seconds, receive its end and answer the server's pings.
struct OpenLease {
  ~OpenLease() {
    context.TryCancel();
    queue.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue.Next(&tag, &ok)) {
    }
  }

  // Waits for the one operation that was started. False if it has not ended by `deadline`.
  bool Wait(absl::Time deadline, bool* ok) {
    void* tag = nullptr;
    return queue.AsyncNext(&tag, ok, ToGrpc(deadline)) == grpc::CompletionQueue::GOT_EVENT;
  }
  // The server sends one reply, so any other event is the end.
  bool ended() {
    bool ok = false;
    return Wait(absl::Now(), &ok);
  }

  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  v1::HoldLeaseResponse response;
  std::unique_ptr<grpc::ClientAsyncReader<v1::HoldLeaseResponse>> reader;
};

class GrpcLease final : public HeldLease {
 public:
  GrpcLease(std::string id, std::unique_ptr<OpenLease> call)
      : HeldLease(std::move(id)), call_(std::move(call)) {}
  bool ended() override { return call_->ended(); }

 private:
  const std::unique_ptr<OpenLease> call_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HeldLease>> GrpcTransport::HoldLease(const CallOptions& options) {
  const absl::Time deadline = *options.deadline;
  auto call = std::make_unique<OpenLease>();
  Prepare(absl::InfiniteFuture(), options.affinity, &call->context);
  call->reader = v1::AttentionService::NewStub(channel_)->AsyncHoldLease(&call->context, {},
                                                                         &call->queue, nullptr);
  bool ok = false;
  if (!call->Wait(deadline, &ok)) return TooLate();
  if (ok) {
    call->reader->Read(&call->response, nullptr);
    if (!call->Wait(deadline, &ok)) return TooLate();
  }
  if (!ok) {
    grpc::Status end;
    call->reader->Finish(&end, nullptr);
    if (!call->Wait(deadline, &ok)) {
      call->context.TryCancel();
      call->Wait(absl::InfiniteFuture(), &ok);  // it writes to `end`
      return TooLate();
    }
    absl::Status status = FromGrpc(end);
    return status.ok() ? absl::InternalError("reply: HoldLease ended without one") : status;
  }
  std::string id = call->response.lease_id();
  if (id.empty()) return absl::InternalError("reply: no lease_id");
  call->reader->Read(&call->response, nullptr);  // until the call ends
  return std::make_unique<GrpcLease>(std::move(id), std::move(call));
}

}  // namespace flashcore::client
