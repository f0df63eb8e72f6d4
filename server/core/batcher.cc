#include "server/core/batcher.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace flashcore::server {

absl::Status Batcher::Enqueue(AttendOperation* operation) {
  operation->query_rows = operation->request.query_rows();
  {
    MutexLock lock(&mutex_);
    if (closed_) return absl::UnavailableError("the server is draining");
    if (queue_.size() >= static_cast<size_t>(options_.max_queue_requests)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the request queue is full: ", queue_.size(),
                       " requests are waiting, which is the limit"));
    }
    operation->submitted = clock_->Now();
    queue_.push_back(operation);
  }
  not_empty_.NotifyOne();
  return absl::OkStatus();
}

bool Batcher::Take(Batch* batch) {
  batch->clear();
  MutexLock lock(&mutex_);
  while (queue_.empty() && !closed_) not_empty_.Wait(&mutex_);
  if (queue_.empty()) return false;

  DropDead(batch);
  if (queue_.empty()) return true;
  const kernels::Geometry geometry = queue_.front()->request.geometry();
  int64_t rows = 0;
  auto keep = queue_.begin();
  for (auto it = queue_.begin(); it != queue_.end(); ++it) {
    AttendOperation* operation = *it;
    const bool fits =
        batch->operations.empty() ||
        (batch->operations.size() < static_cast<size_t>(options_.max_batch_requests) &&
         rows + operation->query_rows <= options_.max_batch_query_rows);
    if (fits && operation->request.geometry() == geometry) {
      batch->operations.push_back(operation);
      rows += operation->query_rows;
    } else {
      *keep++ = operation;
    }
  }
  queue_.erase(keep, queue_.end());
  // Another lane may be waiting for what stays.
  if (!queue_.empty()) not_empty_.NotifyOne();
  return true;
}

void Batcher::DropDead(Batch* batch) {
  const TimePoint now = clock_->Now();
  auto dead = [&](AttendOperation* operation) {
    if (operation->cancelled.load(std::memory_order_relaxed)) {
      batch->dropped.emplace_back(
          operation, absl::CancelledError("cancelled by the client while it was queued"));
    } else if (operation->deadline <= now) {
      batch->dropped.emplace_back(
          operation, absl::DeadlineExceededError(absl::StrCat(
                         "the deadline passed while the request was queued, after ",
                         (now - operation->submitted) / std::chrono::microseconds(1), " us")));
    } else {
      return false;
    }
    return true;
  };
  queue_.erase(std::remove_if(queue_.begin(), queue_.end(), dead), queue_.end());
}

void Batcher::Close() {
  {
    MutexLock lock(&mutex_);
    closed_ = true;
  }
  not_empty_.NotifyAll();
}

int Batcher::depth() const {
  MutexLock lock(&mutex_);
  return static_cast<int>(queue_.size());
}

}  // namespace flashcore::server
