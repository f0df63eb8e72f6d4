#include "server/memory/staging_pool.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"

namespace flashcore::server {
namespace {

constexpr size_t kSmallestClass = 4096;

constexpr size_t kMaxIdleAccounts = 64;

size_t Capacity(size_t bytes) { return bytes == 0 ? 0 : StagingPool::SizeClass(bytes); }

size_t Capacity(const StagingClaim& claim) {
  return Capacity(claim.input_bytes) + Capacity(claim.result_bytes);
}

absl::Status Cancelled() { return absl::CancelledError("cancelled by the client"); }

}  // namespace

void StagingBuffer::Releaser::operator()(std::byte* data) const {
  pool->Release(account, data, capacity);
}

StagingPool::Allocator StagingPool::HeapAllocator() {
  return {[](size_t bytes) { return std::aligned_alloc(kAlignment, bytes); },
          [](void* memory) { std::free(memory); }};
}

StagingPool::StagingPool(size_t limit_bytes, Allocator allocator, size_t max_waiting_bytes,
                         size_t client_bytes)
    : limit_bytes_(limit_bytes),
      allocator_(std::move(allocator)),
      max_waiting_bytes_(max_waiting_bytes),
      client_bytes_(client_bytes) {}

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
  const size_t limit = client_bytes_ == 0 ? limit_bytes_ : std::min(limit_bytes_, client_bytes_);
  return claim.input_bytes <= limit && claim.result_bytes <= limit && Capacity(claim) <= limit;
}

bool StagingPool::IsOverShare(const StagingClaim& claim, const StagingAccount& account) const {
  return client_bytes_ > 0 && account.used_bytes + Capacity(claim) > client_bytes_;
}

StagingAccounts::iterator StagingPool::AccountOf(const StagingClaim& claim) {
  const auto account = accounts_.find(claim.client);
  return account != accounts_.end() ? account
                                    : accounts_.try_emplace(std::string(claim.client)).first;
}

void StagingPool::Forget(StagingAccounts::iterator account) {
  const bool idle = account->second.used_bytes == 0 && account->second.waiting == 0;
  if (idle && accounts_.size() > kMaxIdleAccounts) accounts_.erase(account);
}

absl::Status StagingPool::Acquire(StagingClaim* claim) {
  if (claim->input_bytes == 0 && claim->result_bytes == 0) return absl::OkStatus();
  MutexLock lock(&mutex_);
  if (memory_awaited_ || !CanEverFit(*claim)) return FullLocked(*claim);
  const auto account = AccountOf(*claim);
  if (!IsOverShare(*claim, account->second) && TryAcquire(claim, account)) return absl::OkStatus();
  absl::Status full = FullLocked(*claim);
  Forget(account);
  return full;
}

absl::Status StagingPool::JoinQueue(StagingClaim* claim) {
  MutexLock lock(&mutex_);
  if (!ended_.ok()) return ended_;
  if (!CanEverFit(*claim) ||
      (!queue_.empty() && waiting_bytes_ + claim->input_bytes > max_waiting_bytes_)) {
    return FullLocked(*claim);
  }
  const auto account = AccountOf(*claim);
  if (account->second.waiting >= kMaxWaitingOverShare && IsOverShare(*claim, account->second)) {
    return FullLocked(*claim);
  }
  const auto place = queue_.insert(queue_.end(), {claim, account});
  ++account->second.waiting;
  waiting_bytes_ += claim->input_bytes;
  ServeQueue();
  if (used_bytes_ > 0) return absl::OkStatus();
  // The allocator has no memory, and no buffer is in use whose release could serve this claim.
  Remove(place);
  ServeQueue();
  return FullLocked(*claim);
}

bool StagingPool::LeaveQueue(StagingClaim* claim) {
  MutexLock lock(&mutex_);
  const auto place = std::find_if(queue_.begin(), queue_.end(),
                                  [&](const Waiter& waiter) { return waiter.claim == claim; });
  if (place == queue_.end()) return true;
  Forget(Remove(place));
  ServeQueue();  // the claims behind it may need less
  return false;
}

StagingAccounts::iterator StagingPool::Remove(std::list<Waiter>::iterator place) {
  const auto account = place->account;
  --account->second.waiting;
  waiting_bytes_ -= place->claim->input_bytes;
  queue_.erase(place);
  return account;
}

void StagingPool::EndWaits(const absl::Status& status) {
  MutexLock lock(&mutex_);
  ended_ = status;
  while (!queue_.empty()) {
    StagingClaim* const claim = queue_.front().claim;
    Forget(Remove(queue_.begin()));
    claim->refusal = status;
    claim->granted();
  }
  memory_awaited_ = false;
}

absl::Status StagingPool::FullError(const StagingClaim& claim) const {
  MutexLock lock(&mutex_);
  return FullLocked(claim);
}

absl::Status StagingPool::FullLocked(const StagingClaim& claim) const {
  const auto account = accounts_.find(claim.client);
  const StagingAccount held = account == accounts_.end() ? StagingAccount() : account->second;
  const size_t needed = claim.input_bytes + claim.result_bytes;
  const bool never_fits = claim.input_bytes > client_bytes_ || claim.result_bytes > client_bytes_;
  if (client_bytes_ > 0 && (never_fits || IsOverShare(claim, held))) {
    const absl::Status full = absl::ResourceExhaustedError(
        absl::StrCat("staging memory of this client: the request needs ", needed, " bytes; ",
                     held.used_bytes, " of the ", client_bytes_,
                     " of --client_staging_bytes are in use by its requests and by "
                     "replies that it has not read, and ",
                     held.waiting, " of its requests wait"));
    if (!CanEverFit(claim)) return WithTooLarge(full, needed, client_bytes_);
    return WithInfo(full, reason::kQuotaExceeded,
                    {{"limit", "client_staging_bytes"},
                     {"needed", needed},
                     {"used", held.used_bytes},
                     {"allowed", client_bytes_}});
  }
  const absl::Status full = absl::ResourceExhaustedError(
      absl::StrCat("staging memory: the request needs ", needed, " bytes; ", used_bytes_, " of ",
                   limit_bytes_, " are in use, and ", queue_.size(), " requests wait"));
  if (!CanEverFit(claim)) return WithTooLarge(full, needed, limit_bytes_);
  return WithInfo(full, reason::kStagingFull,
                  {{"needed_bytes", needed}, {"limit_bytes", limit_bytes_}});
}

bool StagingPool::TryAcquire(StagingClaim* claim, StagingAccounts::iterator account) {
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
  account->second.used_bytes += input_capacity + result_capacity;
  claim->inputs = StagingBuffer(this, account, inputs, input_capacity);
  claim->results = StagingBuffer(this, account, results, result_capacity);
  return true;
}

void StagingPool::ServeQueue() {
  memory_awaited_ = false;
  for (auto place = queue_.begin(); place != queue_.end();) {
    const auto next = std::next(place);
    StagingClaim* const claim = place->claim;
    if (!IsOverShare(*claim, place->account->second)) {
      if (!TryAcquire(claim, place->account)) {
        memory_awaited_ = true;
        return;
      }
      Remove(place);
      claim->granted();
    }
    place = next;
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

void StagingPool::Release(StagingAccounts::iterator account, std::byte* data, size_t capacity) {
  MutexLock lock(&mutex_);
  account->second.used_bytes -= capacity;
  Keep(data, capacity);
  ServeQueue();
  Forget(account);
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
    } else if (status.ok()) {
      status = claim_->refusal;
    }
  }
  auto done = std::move(done_);  // which may destroy this
  done(std::move(status));
}

}  // namespace flashcore::server
