#include "server/memory/staging_pool.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"

namespace flashcore::server {
namespace {

constexpr size_t kSmallestClass = 4096;

size_t Capacity(size_t bytes) { return bytes == 0 ? 0 : StagingPool::SizeClass(bytes); }

absl::Status Cancelled() { return absl::CancelledError("cancelled by the client"); }

}  // namespace

void StagingBuffer::Releaser::operator()(std::byte* data) const { pool->Release(data, capacity); }

StagingPool::Allocator StagingPool::HeapAllocator() {
  return {[](size_t bytes) { return std::aligned_alloc(kAlignment, bytes); },
          [](void* memory) { std::free(memory); }};
}

StagingPool::StagingPool(size_t limit_bytes, Allocator allocator, size_t max_waiting_bytes)
    : limit_bytes_(limit_bytes),
      allocator_(std::move(allocator)),
      max_waiting_bytes_(max_waiting_bytes) {}

StagingPool::~StagingPool() {
  MutexLock lock(&mutex_);
  while (used_bytes_ > 0) all_released_.Wait(&mutex_);
  for (auto& [capacity, buffers] : free_) {
    for (std::byte* buffer : buffers) allocator_.free(buffer);
  }
}

size_t StagingPool::SizeClass(size_t bytes) {
  size_t octave = kSmallestClass;
  if (bytes <= octave) return octave;
  while (octave * 2 < bytes) octave *= 2;
  const size_t step = octave / 4;  // octave < bytes <= 2 * octave
  return (bytes + step - 1) / step * step;
}

bool StagingPool::CanEverFit(const StagingClaim& claim) const {
  // Each size is checked before SizeClass, which would overflow on a huge one.
  return claim.input_bytes <= limit_bytes_ && claim.result_bytes <= limit_bytes_ &&
         Capacity(claim.input_bytes) + Capacity(claim.result_bytes) <= limit_bytes_;
}

absl::Status StagingPool::Acquire(StagingClaim* claim) {
  MutexLock lock(&mutex_);
  const bool is_empty = claim->input_bytes == 0 && claim->result_bytes == 0;
  const bool acquired = queue_.empty() && CanEverFit(*claim) && TryAcquire(claim);
  return is_empty || acquired ? absl::OkStatus() : FullLocked(*claim);
}

absl::Status StagingPool::JoinQueue(StagingClaim* claim) {
  MutexLock lock(&mutex_);
  if (!CanEverFit(*claim) ||
      (!queue_.empty() && waiting_bytes_ + claim->input_bytes > max_waiting_bytes_)) {
    return FullLocked(*claim);
  }
  queue_.push_back(claim);
  waiting_bytes_ += claim->input_bytes;
  ServeQueue();
  if (used_bytes_ > 0) return absl::OkStatus();
  // The allocator has no memory, and no buffer is in use whose release could serve this claim.
  queue_.pop_back();
  waiting_bytes_ -= claim->input_bytes;
  return FullLocked(*claim);
}

bool StagingPool::LeaveQueue(StagingClaim* claim) {
  MutexLock lock(&mutex_);
  const auto place = std::find(queue_.begin(), queue_.end(), claim);
  if (place == queue_.end()) return true;
  queue_.erase(place);
  waiting_bytes_ -= claim->input_bytes;
  ServeQueue();  // the claims behind it may need less
  return false;
}

absl::Status StagingPool::FullError(const StagingClaim& claim) const {
  MutexLock lock(&mutex_);
  return FullLocked(claim);
}

absl::Status StagingPool::FullLocked(const StagingClaim& claim) const {
  return absl::ResourceExhaustedError(absl::StrCat(
      "staging memory: the request needs ", claim.input_bytes + claim.result_bytes, " bytes; ",
      used_bytes_, " of ", limit_bytes_, " are in use, and ", queue_.size(), " requests wait"));
}

bool StagingPool::TryAcquire(StagingClaim* claim) {
  const size_t input_capacity = Capacity(claim->input_bytes);
  const size_t result_capacity = Capacity(claim->result_bytes);
  if (used_bytes_ + input_capacity + result_capacity > limit_bytes_) return false;
  std::byte* const inputs = Allocate(input_capacity);
  std::byte* const results = Allocate(result_capacity);
  if ((inputs == nullptr && input_capacity > 0) || (results == nullptr && result_capacity > 0)) {
    if (inputs != nullptr) Keep(inputs, input_capacity);
    if (results != nullptr) Keep(results, result_capacity);
    return false;
  }
  claim->inputs = StagingBuffer(this, inputs, input_capacity);
  claim->results = StagingBuffer(this, results, result_capacity);
  return true;
}

void StagingPool::ServeQueue() {
  while (!queue_.empty() && TryAcquire(queue_.front())) {
    StagingClaim* const claim = queue_.front();
    queue_.pop_front();
    waiting_bytes_ -= claim->input_bytes;
    claim->granted();
  }
}

std::byte* StagingPool::Allocate(size_t capacity) {
  if (capacity == 0) return nullptr;
  auto kept = free_.find(capacity);
  std::byte* data = nullptr;
  if (kept != free_.end() && !kept->second.empty()) {
    data = kept->second.back();
    kept->second.pop_back();
    free_bytes_ -= capacity;
  } else {
    while (used_bytes_ + free_bytes_ + capacity > limit_bytes_) FreeLargest();
    do {
      data = static_cast<std::byte*>(allocator_.allocate(capacity));
      // Kept buffers may be the memory that the allocator lacks.
    } while (data == nullptr && FreeLargest());
    if (data == nullptr) return nullptr;
  }
  used_bytes_ += capacity;
  return data;
}

bool StagingPool::FreeLargest() {
  for (auto it = free_.rbegin(); it != free_.rend(); ++it) {
    if (it->second.empty()) continue;
    allocator_.free(it->second.back());
    it->second.pop_back();
    free_bytes_ -= it->first;
    return true;
  }
  return false;
}

void StagingPool::Keep(std::byte* data, size_t capacity) {
  free_[capacity].push_back(data);
  used_bytes_ -= capacity;
  free_bytes_ += capacity;
}

void StagingPool::Release(std::byte* data, size_t capacity) {
  MutexLock lock(&mutex_);
  Keep(data, capacity);
  ServeQueue();
  // Under the lock: after it, a waiting destructor may have destroyed the pool.
  if (used_bytes_ == 0) all_released_.NotifyAll();
}

size_t StagingPool::used_bytes() const {
  MutexLock lock(&mutex_);
  return used_bytes_;
}

size_t StagingPool::free_bytes() const {
  MutexLock lock(&mutex_);
  return free_bytes_;
}

size_t StagingPool::waiting() const {
  MutexLock lock(&mutex_);
  return queue_.size();
}

void StagingWait::Start(StagingPool* pool, StagingClaim* claim, Nanoseconds limit,
                        std::unique_ptr<Alarm> alarm, absl::AnyInvocable<void(absl::Status)> done) {
  MutexLock lock(&mutex_);
  pool_ = pool;
  claim_ = claim;
  done_ = std::move(done);
  alarm_ = std::move(alarm);
  alarm_->Set(limit, [this] { End(); });
  claim->granted = [this] { alarm_->Cancel(); };
  refusal_ = cancelled_ ? Cancelled() : pool->JoinQueue(claim);
  if (!refusal_.ok()) alarm_->Cancel();
}

void StagingWait::Cancel() {
  MutexLock lock(&mutex_);
  cancelled_ = true;
  if (alarm_ != nullptr) alarm_->Cancel();
}

void StagingWait::End() {
  absl::Status status;
  {
    MutexLock lock(&mutex_);  // Start may still hold it
    status = refusal_;
    if (status.ok() && !pool_->LeaveQueue(claim_)) {
      status =
          cancelled_
              ? Cancelled()
              : absl::DeadlineExceededError("the deadline passed before there was staging memory");
    }
  }
  auto done = std::move(done_);  // which may destroy this
  done(std::move(status));
}

}  // namespace flashcore::server
