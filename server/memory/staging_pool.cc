#include "server/memory/staging_pool.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"

namespace flashcore::server {
namespace {

constexpr size_t kSmallestClass = 4096;

size_t Capacity(size_t bytes) { return bytes == 0 ? 0 : StagingPool::SizeClass(bytes); }

size_t Capacity(const StagingClaim& claim) {
  return Capacity(claim.input_bytes) + Capacity(claim.result_bytes);
}

absl::Status Cancelled() { return absl::CancelledError("cancelled by the client"); }

}  // namespace

void StagingBuffer::Releaser::operator()(std::byte* data) const {
  pool->Release(client, data, capacity);
}

StagingPool::Allocator StagingPool::HeapAllocator() {
  return {[](size_t bytes) { return std::aligned_alloc(kAlignment, bytes); },
          [](void* memory) { std::free(memory); }};
}

StagingPool::StagingPool(size_t limit_bytes, Allocator allocator, size_t max_waiting_bytes,
                         size_t client_bytes)
    : limit_bytes_(limit_bytes),
      allocator_(std::move(allocator)),
      shares_({limit_bytes, client_bytes}),
      queue_({max_waiting_bytes, 0}) {}

StagingPool::~StagingPool() {
  MutexLock lock(&mutex_);
  while (shares_.held() > 0) all_released_.Wait(&mutex_);
  for (auto& [capacity, buffers] : kept_) {
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
  const size_t share = shares_.limits().one;
  const size_t limit = share == 0 ? limit_bytes_ : std::min(limit_bytes_, share);
  return claim.input_bytes <= limit && claim.result_bytes <= limit && Capacity(claim) <= limit;
}

StagingPool::Need StagingPool::NeedOf(const StagingClaim& claim) const {
  const size_t bytes = Capacity(claim);
  return {bytes, shares_.held(claim.client) + bytes};
}

const Shares::Client* StagingPool::MustGiveBackFor(const Need& need) const {
  if (unread_bytes_ + need.bytes <= limit_bytes_) return nullptr;
  const Shares::Client* const client = overdue_.Largest();
  return client != nullptr && client->held > need.held ? client : nullptr;
}

void StagingPool::Await(const StagingClaim& claim) {
  const Need need = NeedOf(claim);
  if (MustGiveBackFor(needed_) != nullptr || MustGiveBackFor(need) == nullptr) return;
  needed_ = need;
  if (on_debt_) on_debt_();
}

absl::Status StagingPool::Acquire(StagingClaim* claim) {
  if (claim->input_bytes == 0 && claim->result_bytes == 0) return absl::OkStatus();
  MutexLock lock(&mutex_);
  if (memory_awaited_ || !CanEverFit(*claim)) return FullLocked(*claim);
  if (!shares_.IsOverShare(claim->client, Capacity(*claim))) {
    if (TryAcquire(claim)) return absl::OkStatus();
    Await(*claim);
  }
  return FullLocked(*claim);
}

absl::Status StagingPool::JoinQueue(StagingClaim* claim) {
  MutexLock lock(&mutex_);
  if (!ended_.ok()) return ended_;
  if (!CanEverFit(*claim)) return FullLocked(*claim);
  StagingClaim::Place& place = claim->place_;
  place.claim = claim;
  place.number = ++arrivals_;
  queue_.Take(claim->client, std::max<size_t>(claim->input_bytes, 1), &place);
  ServeQueue();
  if (place.client != nullptr && shares_.held() == 0) {
    // The allocator has no memory, and no buffer is in use whose release could serve this claim.
    queue_.Give(&place);
    ServeQueue();
    return FullLocked(*claim);
  }
  while (queue_.items() > 1 && queue_.MustGiveBack() != nullptr) {
    StagingClaim* const newest =
        static_cast<StagingClaim::Place*>(queue_.MustGiveBack()->newest)->claim;
    queue_.Give(&newest->place_);
    absl::Status full = FullLocked(*newest);
    if (newest != claim) {
      newest->refusal = full;
      newest->granted();
    }
    ServeQueue();
    if (newest == claim) return full;
  }
  return absl::OkStatus();
}

bool StagingPool::LeaveQueue(StagingClaim* claim) {
  MutexLock lock(&mutex_);
  if (claim->place_.client == nullptr) return true;
  queue_.Give(&claim->place_);
  ServeQueue();  // the claims behind it may need less
  return false;
}

void StagingPool::Refuse(StagingClaim* claim, const absl::Status& status) {
  queue_.Give(&claim->place_);
  claim->refusal = status;
  claim->granted();
}

void StagingPool::EndWaits(const absl::Status& status) {
  MutexLock lock(&mutex_);
  ended_ = status;
  while (queue_.items() > 0) {
    Refuse(static_cast<StagingClaim::Place*>(queue_.Largest()->oldest)->claim, status);
  }
  memory_awaited_ = false;
}

absl::Status StagingPool::FullError(const StagingClaim& claim) const {
  MutexLock lock(&mutex_);
  return FullLocked(claim);
}

absl::Status StagingPool::FullLocked(const StagingClaim& claim) const {
  const size_t share = shares_.limits().one;
  const size_t needed = claim.input_bytes + claim.result_bytes;
  const bool never_fits = claim.input_bytes > share || claim.result_bytes > share;
  if (share > 0 && (never_fits || shares_.IsOverShare(claim.client, Capacity(claim)))) {
    const size_t held = shares_.held(claim.client);
    const absl::Status full = absl::ResourceExhaustedError(absl::StrCat(
        "staging memory of this client: the request needs ", needed, " bytes; ", held, " of the ",
        share,
        " of --client_staging_bytes are in use by its requests and by replies that it has not "
        "read, and requests of ",
        queue_.held(claim.client), " bytes wait"));
    if (!CanEverFit(claim)) return WithTooLarge(full, needed, share);
    return WithInfo(full, reason::kQuotaExceeded,
                    {{"limit", "client_staging_bytes"},
                     {"needed", needed},
                     {"used", held},
                     {"allowed", share}});
  }
  const absl::Status full = absl::ResourceExhaustedError(
      absl::StrCat("staging memory: the request needs ", needed, " bytes; ", shares_.held(), " of ",
                   limit_bytes_, " are in use, and ", queue_.items(), " requests wait"));
  if (!CanEverFit(claim)) return WithTooLarge(full, needed, limit_bytes_);
  return WithInfo(full, reason::kStagingFull,
                  {{"needed_bytes", needed}, {"limit_bytes", limit_bytes_}});
}

bool StagingPool::TryAcquire(StagingClaim* claim) {
  const size_t input_capacity = Capacity(claim->input_bytes);
  const size_t result_capacity = Capacity(claim->result_bytes);
  if (shares_.held() + input_capacity + result_capacity > limit_bytes_) return false;
  std::byte* const inputs = Allocate(input_capacity);
  std::byte* const results = Allocate(result_capacity);
  if ((inputs == nullptr && input_capacity > 0) || (results == nullptr && result_capacity > 0)) {
    if (inputs != nullptr) kept_[input_capacity].push_back(inputs);
    if (results != nullptr) kept_[result_capacity].push_back(results);
    return false;
  }
  Shares::Client* const client = shares_.Take(claim->client, input_capacity + result_capacity);
  claim->inputs = StagingBuffer(this, client, inputs, input_capacity);
  claim->results = StagingBuffer(this, client, results, result_capacity);
  return true;
}

bool StagingPool::WaitsForMemory(const StagingClaim& claim, const Need& need) const {
  return !shares_.IsOverShare(claim.client, need.bytes) &&
         (overdue_.held() + need.bytes <= limit_bytes_ || MustGiveBackFor(need) != nullptr);
}

StagingClaim* StagingPool::Next() const {
  StagingClaim* next = nullptr;
  size_t least = SIZE_MAX;  // that the client of a claim would hold
  if (overdue_.held() > 0) {
    for (const auto& [name, client] : queue_.clients()) {
      const StagingClaim* const claim = Oldest(client);
      if (claim == nullptr) continue;
      const Need need = NeedOf(*claim);
      if (WaitsForMemory(*claim, need)) least = std::min(least, need.held);
    }
  }
  for (const auto& [name, client] : queue_.clients()) {
    StagingClaim* const claim = Oldest(client);
    if (claim == nullptr || !WaitsForMemory(*claim, NeedOf(*claim))) continue;
    const bool yields = overdue_.held() > 0 && overdue_.held(name) > least;
    const bool later = next != nullptr && claim->place_.number > next->place_.number;
    if (!yields && !later) next = claim;
  }
  return next;
}

void StagingPool::ServeQueue() {
  memory_awaited_ = false;
  while (queue_.items() > 0) {
    StagingClaim* const claim = Next();
    if (claim == nullptr) return;
    if (!TryAcquire(claim)) {
      memory_awaited_ = true;
      Await(*claim);
      return;
    }
    queue_.Give(&claim->place_);
    claim->granted();
  }
}

void StagingPool::AddUnread(size_t bytes) {
  MutexLock lock(&mutex_);
  unread_bytes_ += bytes;
  ServeQueue();  // somebody may have to give back
}

void StagingPool::AddOverdue(absl::string_view client, size_t bytes, Shares::Item* overdue) {
  MutexLock lock(&mutex_);
  overdue_.Take(client, bytes, overdue);
  ServeQueue();  // another claim may be next
}

void StagingPool::RemoveUnread(size_t bytes, Shares::Item* overdue) {
  MutexLock lock(&mutex_);
  unread_bytes_ -= bytes;
  if (overdue->client == nullptr) return;
  overdue_.Give(overdue);
  ServeQueue();  // another claim may be next
}

Shares::Item* StagingPool::Debt() {
  MutexLock lock(&mutex_);
  const Shares::Client* const client = MustGiveBackFor(needed_);
  if (client != nullptr) return client->oldest;
  needed_ = {};
  return nullptr;
}

void StagingPool::SetOnDebt(std::function<void()> on_debt) {
  MutexLock lock(&mutex_);
  on_debt_ = std::move(on_debt);
}

std::byte* StagingPool::Allocate(size_t capacity) {
  if (capacity == 0) return nullptr;
  std::byte* data = nullptr;
  if (const auto kept = kept_.find(capacity); kept != kept_.end() && !kept->second.empty()) {
    data = kept->second.back();
    kept->second.pop_back();
    return data;
  }
  while (allocated_bytes_ + capacity > limit_bytes_) FreeLargest();
  do {
    data = static_cast<std::byte*>(allocator_.allocate(capacity));
    // Kept buffers may be the memory that the allocator lacks.
  } while (data == nullptr && FreeLargest());
  if (data != nullptr) allocated_bytes_ += capacity;
  return data;
}

bool StagingPool::FreeLargest() {
  for (auto it = kept_.rbegin(); it != kept_.rend(); ++it) {
    if (it->second.empty()) continue;
    allocator_.free(it->second.back());
    it->second.pop_back();
    allocated_bytes_ -= it->first;
    return true;
  }
  return false;
}

void StagingPool::Release(Shares::Client* client, std::byte* data, size_t capacity) {
  MutexLock lock(&mutex_);
  shares_.Give(client, capacity);
  kept_[capacity].push_back(data);
  ServeQueue();
  // Under the lock: after it, a waiting destructor may have destroyed the pool.
  if (shares_.held() == 0) all_released_.NotifyAll();
}

size_t StagingPool::used_bytes() const {
  MutexLock lock(&mutex_);
  return shares_.held();
}

size_t StagingPool::unread_bytes() const {
  MutexLock lock(&mutex_);
  return unread_bytes_;
}

size_t StagingPool::free_bytes() const {
  MutexLock lock(&mutex_);
  return allocated_bytes_ - shares_.held();
}

size_t StagingPool::waiting() const {
  MutexLock lock(&mutex_);
  return queue_.items();
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
