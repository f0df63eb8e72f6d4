#include "server/transport/rpc/input_waits.h"

#include <optional>

namespace flashcore::server {
namespace {

// How the operation's wait ends now; nullopt: it goes on.
std::optional<absl::Status> EndOf(const AttendOperation& operation, TimePoint now) {
  if (operation.cancelled.load(std::memory_order_relaxed)) {
    return absl::CancelledError("cancelled by the client before inputs_ready was reached");
  }
  if (operation.request.inputs_ready.reached()) return absl::OkStatus();
  if (operation.deadline <= now) {
    return absl::DeadlineExceededError("the deadline passed before inputs_ready was reached");
  }
  return std::nullopt;
}

}  // namespace

void InputWaits::Add(AttendOperation* operation, Ready ready) {
  absl::Status end;
  {
    MutexLock lock(&mutex_);
    end = end_;
    if (end.ok()) {
      waits_.push_back({operation, std::move(ready)});
      if (!empty_.exchange(false)) return;
    }
  }
  return end.ok() ? wake_() : ready(end);
}

bool InputWaits::Poll() {
  if (empty()) return false;
  {
    const TimePoint now = clock_->Now();
    MutexLock lock(&mutex_);
    size_t kept = 0;
    for (Wait& wait : waits_) {
      if (std::optional<absl::Status> end = EndOf(*wait.operation, now); end.has_value()) {
        ended_.emplace_back(std::move(wait), *std::move(end));
      } else if (&waits_[kept++] != &wait) {
        waits_[kept - 1] = std::move(wait);
      }
    }
    waits_.resize(kept);
    empty_ = waits_.empty();
  }
  for (auto& [wait, status] : ended_) wait.ready(status);  // may Add
  const bool any = !ended_.empty();
  ended_.clear();
  return any;
}

void InputWaits::EndAll(const absl::Status& status) {
  std::vector<Wait> waits;
  {
    MutexLock lock(&mutex_);
    waits.swap(waits_);
    empty_ = true;
    end_ = status;
  }
  for (Wait& wait : waits) wait.ready(status);
}

}  // namespace flashcore::server
