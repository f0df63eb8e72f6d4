#include "client/cpp/lease.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/connection.h"
#include "client/cpp/grpc_status.h"
#include "client/cpp/local/link.h"
#include "client/cpp/sequence_calls.h"
#include "flashcore/error_info.h"
#include "flashcore/v1/attention.grpc.pb.h"
#include "grpcpp/client_context.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/support/async_stream.h"

namespace flashcore::client {
namespace {

absl::Status TooLate() { return absl::DeadlineExceededError("the server did not answer in time"); }

}  // namespace

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

Lease::Held::Held() = default;
Lease::Held::Held(Held&&) noexcept = default;
Lease::Held& Lease::Held::operator=(Held&&) noexcept = default;
Lease::Held::~Held() = default;

bool Lease::Held::ended() const {
  if (call != nullptr) return call->ended();
  const std::shared_ptr<local::LocalConnection> on = session.lock();
  return on == nullptr || !on->alive();
}

Lease::Lease(const Connection* connection) : connection_(*connection) {}
Lease::~Lease() = default;

std::string Lease::Affinity(const std::string& wanted) {
  absl::MutexLock lock(&mutex_);
  if (affinity_.empty()) affinity_ = wanted.empty() ? RandomAffinity() : wanted;
  return wanted.empty() ? affinity_ : wanted;
}

absl::StatusOr<std::string> Lease::Id(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  const auto nobody_opens = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !opening_; };
  if (!mutex_.AwaitWithDeadline(absl::Condition(&nobody_opens), deadline)) return TooLate();
  if (!held_.id.empty() && !held_.ended()) return held_.id;
  opening_ = true;
  const std::string affinity = affinity_;
  mutex_.Unlock();
  int attempts = 0;
  absl::StatusOr<Held> opened = Held();
  const absl::Status status =
      connection_.WithRetries(/*safe_to_repeat=*/true, deadline, &attempts, [&] {
        opened = connection_.local() != nullptr ? OpenLocally(deadline) : Open(affinity, deadline);
        return opened.status();
      });
  mutex_.Lock();
  opening_ = false;
  if (!status.ok()) {
    return absl::Status(status.code(), absl::StrCat("lease: ", status.message()));
  }
  held_ = *std::move(opened);
  return held_.id;
}

void Lease::Forget(const std::string& id) {
  Held forgotten;
  absl::MutexLock lock(&mutex_);
  if (id == held_.id) std::swap(forgotten, held_);
}

absl::StatusOr<Lease::Held> Lease::Open(const std::string& affinity, absl::Time deadline) const {
  auto call = std::make_unique<Call>();
  connection_.Prepare(absl::InfiniteFuture(), affinity, &call->context);
  call->reader = connection_.stub()->AsyncHoldLease(&call->context, {}, &call->queue, nullptr);
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
  Held held;
  held.id = call->response.lease_id();
  if (held.id.empty()) return absl::InternalError("reply: no lease_id");
  call->reader->Read(&call->response, nullptr);  // until the call ends
  held.call = std::move(call);
  return held;
}

absl::StatusOr<Lease::Held> Lease::OpenLocally(absl::Time deadline) const {
  const local::SteadyTime end = local::ToSteady(deadline);
  const absl::StatusOr<std::shared_ptr<local::LocalConnection>> session =
      connection_.local()->Connect(end);
  if (!session.ok()) return session.status();
  const absl::StatusOr<std::string> reply =
      (*session)->Call("HoldLease", v1::HoldLeaseRequest().SerializeAsString(), end);
  if (!reply.ok()) return reply.status();
  v1::HoldLeaseResponse response;
  if (!response.ParseFromString(*reply)) {
    return absl::InternalError("reply: not a HoldLeaseResponse");
  }
  Held held;
  held.id = response.lease_id();
  if (held.id.empty()) return absl::InternalError("reply: no lease_id");
  held.session = *session;
  return held;
}

bool IsLeaseLost(const absl::Status& status) { return GetErrorInfo(status).reason == "LEASE_LOST"; }

}  // namespace flashcore::client
