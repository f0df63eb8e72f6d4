#include "client/cpp/lease.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/connection.h"
#include "client/cpp/sequence_calls.h"
#include "flashcore/error_info.h"

namespace flashcore::client {

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
  if (!mutex_.AwaitWithDeadline(absl::Condition(&nobody_opens), deadline))
    return absl::DeadlineExceededError("the server did not answer in time");
  if (held_ != nullptr && !held_->ended()) return held_->id();
  opening_ = true;
  const CallOptions call = {deadline, affinity_};
  mutex_.Unlock();
  int attempts = 0;
  absl::StatusOr<std::unique_ptr<HeldLease>> opened;
  const absl::Status status = connection_.WithRetries(
      /*safe_to_repeat=*/true, deadline, &attempts, [&] {
        opened = connection_.transport().HoldLease(call);
        return opened.status();
      });
  mutex_.Lock();
  opening_ = false;
  if (!status.ok()) {
    return absl::Status(status.code(), absl::StrCat("lease: ", status.message()));
  }
  held_ = *std::move(opened);
  return held_->id();
}

void Lease::Forget(const std::string& id) {
  std::unique_ptr<HeldLease> forgotten;  // destroyed without the lock
  absl::MutexLock lock(&mutex_);
  if (held_ != nullptr && id == held_->id()) std::swap(forgotten, held_);
}

bool IsLeaseLost(const absl::Status& status) { return GetErrorInfo(status).reason == "LEASE_LOST"; }

}  // namespace flashcore::client
