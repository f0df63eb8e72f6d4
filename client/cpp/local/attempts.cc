// Asynchronous requests over the local socket; see Attempts.
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/local/convert.h"
#include "client/cpp/local/transport.h"

namespace flashcore::client::local {
namespace {

class LocalAttempts final : public Attempts {
 public:
  LocalAttempts(std::shared_ptr<LocalTransport> transport, AttendRequest request,
                absl::Time deadline)
      : transport_(std::move(transport)),
        request_(std::move(request)),
        deadline_(ToSteady(deadline)) {}

  // Copies the inputs, to the memory of the connection, or to our own if there is none.
  absl::Status CopyInputs() {
    const absl::Status status = PrepareForSession();
    if (!absl::IsUnavailable(status)) return status;
    const std::pair<const char*, absl::Span<const std::byte>*> inputs[] = {
        {"query", &request_.query}, {"key", &request_.key}, {"value", &request_.value}};
    for (const auto& [name, tensor] : inputs) {
      v1::MemoryRange ignored;
      const absl::StatusOr<bool> stays =
          transport_->regions().Find(name, tensor->data(), tensor->size(), false, &ignored);
      if (!stays.ok()) return stays.status();
      if (!*stays) *tensor = own_.emplace_back(tensor->begin(), tensor->end());
    }
    return absl::OkStatus();
  }

  void Start(Done done) override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::Status status = PrepareForSession();
    if (status.ok()) status = Submit(&done);
    if (!status.ok()) done(std::move(status), {});
  }

  void Cancel() override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
    if (ring_ != nullptr) ring_->Cancel(ticket_);
  }

  size_t request_bytes() const override { return prepared_ == nullptr ? 0 : prepared_->Bytes(); }

 private:
  // Takes `done` if OK.
  absl::Status Submit(Done* done) ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::StatusOr<AsyncRing*> ring = session_->async(deadline_);
    if (!ring.ok()) return ring.status();
    absl::MutexLock lock(&mutex_);
    if (cancelled_) return absl::CancelledError("CANCELLED");
    ring_ = *ring;
    ticket_ = ring_->Start(prepared_, deadline_, std::move(*done));
    return absl::OkStatus();
  }

  // Connects if need be. Registered memory is of one connection.
  absl::Status PrepareForSession() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::StatusOr<std::shared_ptr<LocalSession>> session = transport_->Connect(deadline_);
    if (!session.ok()) return session.status();
    if (*session == session_) return absl::OkStatus();
    auto prepared = std::make_shared<RingRequest>();
    const absl::Status status = (*session)->Prepare(request_, deadline_, prepared.get());
    if (!status.ok()) return status;
    prepared->UseCopies(&request_);
    absl::MutexLock lock(&mutex_);
    ring_ = nullptr;
    prepared_ = std::move(prepared);  // the old copies are in the old one
    session_.swap(*session);
    return status;
  }

  const std::shared_ptr<LocalTransport> transport_;
  AttendRequest request_;  // its inputs are copies, or in shared memory
  const SteadyTime deadline_;
  std::vector<std::vector<std::byte>> own_;
  std::shared_ptr<LocalSession> session_;  // that prepared_ is for; outlives it
  std::shared_ptr<RingRequest> prepared_;
  absl::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  AsyncRing* ring_ ABSL_GUARDED_BY(mutex_) = nullptr;  // of the attempt that runs
  uint64_t ticket_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Attempts>> LocalTransport::MakeAttempts(const AttendRequest& request,
                                                                       const CallOptions& call) {
  auto attempts = std::make_unique<LocalAttempts>(shared_from_this(), request, *call.deadline);
  const absl::Status status = attempts->CopyInputs();
  if (!status.ok()) return status;
  return attempts;
}

}  // namespace flashcore::client::local
