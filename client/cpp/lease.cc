#include "client/cpp/lease.h"

#include <chrono>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/connection.h"
#include "client/cpp/grpc_status.h"
#include "client/cpp/local/link.h"
#include "client/cpp/sequence_calls.h"
#include "flashcore/v1/attention.grpc.pb.h"
#include "grpcpp/client_context.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/support/async_stream.h"

namespace flashcore::client {

// An open HoldLease. No thread waits for its end: one that waits in gRPC polls all sockets of the
// process, and slows down blocking calls (connection.cc). Other calls, and gRPC's own poller every
// few seconds, receive its end and answer the server's pings.
struct Lease::Call {
  ~Call() {
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
    return queue.AsyncNext(&tag, ok, absl::ToChronoTime(deadline)) ==
           grpc::CompletionQueue::GOT_EVENT;
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

Lease::Lease(const Connection* connection) : connection_(*connection) {}
Lease::~Lease() = default;

std::string Lease::Affinity(const std::string& wanted) {
  absl::MutexLock lock(&mutex_);
  if (affinity_.empty()) affinity_ = wanted.empty() ? RandomAffinity() : wanted;
  return wanted.empty() ? affinity_ : wanted;
}

absl::StatusOr<std::string> Lease::Id(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  if (call_ != nullptr && call_->ended()) {
    call_.reset();
    id_.clear();
  }
  int attempts = 0;
  absl::Status status =
      connection_.WithRetries(/*safe_to_repeat=*/true, deadline, &attempts, [&]() -> absl::Status {
        mutex_.AssertHeld();
        if (connection_.local() != nullptr) return OpenLocally(deadline);
        return id_.empty() ? Open(deadline) : absl::OkStatus();
      });
  if (status.ok()) return id_;
  return absl::Status(status.code(), absl::StrCat("lease: ", status.message()));
}

void Lease::Forget(const std::string& id) {
  absl::MutexLock lock(&mutex_);
  if (id != id_) return;
  id_.clear();
  call_.reset();
  session_.reset();
}

absl::Status Lease::Open(absl::Time deadline) {
  auto call = std::make_unique<Call>();
  connection_.Prepare(absl::InfiniteFuture(), affinity_, &call->context);
  call->reader = connection_.stub()->AsyncHoldLease(&call->context, {}, &call->queue, nullptr);
  const absl::Status late = absl::DeadlineExceededError("the server did not answer in time");
  bool ok = false;
  if (!call->Wait(deadline, &ok)) return late;
  if (ok) {
    call->reader->Read(&call->response, nullptr);
    if (!call->Wait(deadline, &ok)) return late;
  }
  if (!ok) {
    grpc::Status end;
    call->reader->Finish(&end, nullptr);
    if (!call->Wait(deadline, &ok)) {
      call->context.TryCancel();
      call->Wait(absl::InfiniteFuture(), &ok);  // it writes to `end`
      return late;
    }
    absl::Status status = FromGrpc(end);
    return status.ok() ? absl::InternalError("reply: HoldLease ended without one") : status;
  }
  id_ = call->response.lease_id();
  if (id_.empty()) return absl::InternalError("reply: no lease_id");
  call->reader->Read(&call->response, nullptr);  // until the call ends
  call_ = std::move(call);
  return absl::OkStatus();
}

absl::Status Lease::OpenLocally(absl::Time deadline) {
  const absl::StatusOr<std::shared_ptr<local::Session>> session =
      connection_.local()->Connect(deadline);
  if (!session.ok()) return session.status();
  if (session_.lock() == *session) return absl::OkStatus();
  const absl::StatusOr<std::string> reply =
      (*session)->control().Call("HoldLease", v1::HoldLeaseRequest().SerializeAsString(), deadline);
  if (!reply.ok()) return reply.status();
  v1::HoldLeaseResponse response;
  if (!response.ParseFromString(*reply)) {
    return absl::InternalError("reply: not a HoldLeaseResponse");
  }
  if (response.lease_id().empty()) return absl::InternalError("reply: no lease_id");
  id_ = response.lease_id();
  session_ = *session;
  return absl::OkStatus();
}

bool IsLeaseLost(const absl::Status& status) {
  return absl::IsNotFound(status) && absl::StartsWith(status.message(), "lease_id:");
}

}  // namespace flashcore::client
