// An AttendStream over the local socket.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "client/cpp/local/convert.h"
#include "client/cpp/local/transport.h"
#include "client/cpp/stream_core.h"
#include "client/local/process.h"

namespace flashcore::client::local {
namespace {

// Requests go to the ring of one connection, which the first Send opens. The stream breaks with it.
class LocalStream final : public StreamCore, public std::enable_shared_from_this<LocalStream> {
 public:
  LocalStream(std::shared_ptr<LocalTransport> transport, const StreamOptions& options)
      : StreamCore(options), transport_(std::move(transport)), deadline_(options.deadline) {}

  absl::Status Send(const AttendRequest& request, Callback done) override
      ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::StatusOr<std::shared_ptr<LocalSession>> session = Connect();
    if (!session.ok()) return session.status();
    const SteadyTime memory_deadline = MemoryDeadline();
    const absl::StatusOr<AsyncRing*> ring = (*session)->async(memory_deadline);
    if (!ring.ok()) return ring.status();
    auto prepared = std::make_shared<RingRequest>();
    absl::Status status = (*session)->Prepare(request, memory_deadline, prepared.get());
    if (!status.ok()) return status;
    absl::MutexLock lock(&mutex_);
    Pending pending;
    pending.request_bytes = prepared->Bytes();
    pending.done = std::move(done);
    status = Admit(request.request_id, std::move(pending));
    if (!status.ok()) return status;
    ++unfinished_;
    // The answer waits for the mutex.
    pending_[request.request_id].ticket =
        (*ring)->Start(std::move(prepared), ToSteady(std::min(deadline_, absl::Now() + timeout_)),
                       [self = shared_from_this(), id = request.request_id](
                           const absl::Status& answer, AttendResult result) {
                         self->OnAnswer(id, answer, &result);
                       });
    return absl::OkStatus();
  }

  absl::Status Finish() override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    finishing_ = true;
    const auto finished = [this]()
                              ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return unfinished_ == 0; };
    mutex_.Await(absl::Condition(&finished));
    done_ = true;
    return final_;
  }

  void Cancel() override ABSL_LOCKS_EXCLUDED(mutex_) {
    std::shared_ptr<LocalSession> session;
    std::vector<uint64_t> tickets;
    {
      absl::MutexLock lock(&mutex_);
      if (finishing_ && unfinished_ == 0) return;
      Break(absl::CancelledError("CANCELLED"));
      session = session_;
      for (const auto& [id, pending] : pending_) tickets.push_back(pending.ticket);
    }
    if (tickets.empty()) return;
    const absl::StatusOr<AsyncRing*> ring = session->async(SteadyTime::max());
    for (const uint64_t ticket : tickets) (*ring)->Cancel(ticket);
  }

 private:
  // To connect, and for memory and the ring.
  SteadyTime MemoryDeadline() const {
    return ToSteady(std::min(deadline_, absl::Now() + transport_->timeout()));
  }

  absl::StatusOr<std::shared_ptr<LocalSession>> Connect() ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      absl::MutexLock lock(&mutex_);
      if (session_ != nullptr && !session_->alive()) Break(session_->end_status());
      if (session_ != nullptr || broken_) {
        if (broken_) return final_;
        return session_;
      }
    }
    absl::StatusOr<std::shared_ptr<LocalSession>> session = transport_->Connect(MemoryDeadline());
    absl::MutexLock lock(&mutex_);
    if (!session.ok()) {
      Break(session.status());
      return session.status();
    }
    if (session_ == nullptr) session_ = *std::move(session);
    return session_;
  }

  void Break(absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    broken_ = done_ = true;
    final_.Update(std::move(status));
  }

  void OnAnswer(const std::string& id, const absl::Status& status, AttendResult* result)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    const Pending pending = TakePending(id);
    {
      absl::MutexLock lock(&mutex_);
      if (!session_->alive()) Break(session_->end_status());
      if (!status.ok() && absl::Now() >= deadline_) {
        Break(transport_->ExplainDeadline(status, pending.begin));
      }
    }
    result->request_id = id;
    result->request_bytes = pending.request_bytes;
    result->attempts = 1;
    pending.done(transport_->ExplainDeadline(status, pending.begin), std::move(*result));
    absl::MutexLock lock(&mutex_);
    --unfinished_;
  }

  const std::shared_ptr<LocalTransport> transport_;
  const absl::Time deadline_;
  std::shared_ptr<LocalSession> session_ ABSL_GUARDED_BY(mutex_);
  size_t unfinished_ ABSL_GUARDED_BY(mutex_) = 0;  // requests whose callback has not returned
};

}  // namespace

std::shared_ptr<StreamCore> LocalTransport::OpenStream(const StreamOptions& options) {
  return OwnHere(new LocalStream(shared_from_this(), options));
}

}  // namespace flashcore::client::local
