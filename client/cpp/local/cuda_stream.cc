// Requests in the order of CUDA streams over the local socket; see
// Transport::MakeCudaStreamAttempt.
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/local/convert.h"
#include "client/cpp/local/transport.h"

namespace flashcore::client::local {
namespace {

// Belongs to one connection, as the counters do.
class CudaStreamAttempt final : public Attempts {
 public:
  CudaStreamAttempt(std::shared_ptr<const LocalTransport> transport,
                    std::shared_ptr<LocalSession> session, CuStream stream, SteadyTime deadline)
      : transport_(std::move(transport)),
        session_(std::move(session)),
        stream_(stream),
        deadline_(deadline) {}

  absl::Status Prepare(const AttendRequest& request) {
    return session_->PrepareOnCudaStream(request, stream_, deadline_, prepared_.get());
  }

  void Start(Done done) override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::StatusOr<uint64_t> ticket = absl::CancelledError("CANCELLED");
    {
      absl::MutexLock lock(&mutex_);
      if (!cancelled_) ticket = session_->StartOnCudaStream(prepared_, stream_, deadline_, &done);
      if (ticket.ok()) ticket_ = *ticket;
    }
    if (!ticket.ok()) done(ticket.status(), {});
  }

  void Cancel() override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
    if (ticket_ != 0) (*session_->async(deadline_))->Cancel(ticket_);
  }

  size_t request_bytes() const override { return prepared_->Bytes(); }

 private:
  const std::shared_ptr<const LocalTransport> transport_;  // outlives the session
  const std::shared_ptr<LocalSession> session_;
  CuStream const stream_;
  const SteadyTime deadline_;
  const std::shared_ptr<RingRequest> prepared_ = std::make_shared<RingRequest>();
  absl::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t ticket_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: it is not in the ring
};

}  // namespace

absl::StatusOr<std::unique_ptr<Attempts>> LocalTransport::MakeCudaStreamAttempt(
    const AttendRequest& request, void* stream, const CallOptions& call) {
  const SteadyTime deadline = ToSteady(*call.deadline);
  absl::StatusOr<std::shared_ptr<LocalSession>> session = Connect(deadline);
  if (!session.ok()) return session.status();
  auto attempt = std::make_unique<CudaStreamAttempt>(shared_from_this(), *std::move(session),
                                                     stream, deadline);
  if (absl::Status status = attempt->Prepare(request); !status.ok()) return status;
  return attempt;
}

absl::Status LocalSession::PrepareOnCudaStream(const AttendRequest& request, CuStream stream,
                                               SteadyTime deadline, RingRequest* prepared) {
  absl::Status status = prepared->Prepare(request, *regions_, /*pool=*/nullptr, deadline);
  if (!status.ok()) return status;
  if (status = async(deadline).status(); !status.ok()) return status;
  return ToAbsl(timelines_.Open(stream, deadline));
}

absl::StatusOr<uint64_t> LocalSession::StartOnCudaStream(std::shared_ptr<RingRequest> prepared,
                                                         CuStream stream, SteadyTime deadline,
                                                         AsyncRing::Done* done) {
  const absl::StatusOr<AsyncRing*> ring = async(deadline);
  if (!ring.ok()) return ring.status();
  return (*ring)->StartOnCudaStream(std::move(prepared), stream, &timelines_, deadline, done);
}

}  // namespace flashcore::client::local
