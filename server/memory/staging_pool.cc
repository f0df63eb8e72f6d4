#include "server/memory/staging_pool.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace flashcore::server {
namespace {

constexpr size_t kSmallestClass = 4096;

size_t Capacity(size_t bytes) { return bytes == 0 ? 0 : StagingPool::SizeClass(bytes); }

}  // namespace

StagingBuffer& StagingBuffer::operator=(StagingBuffer&& other) noexcept {
  if (this != &other) {
    Reset();
    pool_ = std::exchange(other.pool_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    capacity_ = std::exchange(other.capacity_, 0);
  }
  return *this;
}

void StagingBuffer::Reset() {
  if (data_ != nullptr) pool_->Return(data_, capacity_);
  pool_ = nullptr;
  data_ = nullptr;
  capacity_ = 0;
}

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
  while (used_bytes_ > 0) returned_.Wait(&mutex_);
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

bool StagingPool::EverFits(const StagingClaim& claim) const {
  // Each alone first, because SizeClass takes no number that overflows.
  return claim.input_bytes <= limit_bytes_ && claim.result_bytes <= limit_bytes_ &&
         Capacity(claim.input_bytes) + Capacity(claim.result_bytes) <= limit_bytes_;
}

absl::Status StagingPool::Lend(StagingClaim* claim) {
  MutexLock lock(&mutex_);
  const bool nothing = claim->input_bytes == 0 && claim->result_bytes == 0;
  if (nothing || (line_.empty() && EverFits(*claim) && TryLend(claim))) return absl::OkStatus();
  return FullLocked(*claim);
}

absl::Status StagingPool::Wait(StagingClaim* claim) {
  MutexLock lock(&mutex_);
  if (!EverFits(*claim) ||
      (!line_.empty() && waiting_bytes_ + claim->input_bytes > max_waiting_bytes_)) {
    return FullLocked(*claim);
  }
  line_.push_back(claim);
  waiting_bytes_ += claim->input_bytes;
  ServeLine();
  if (used_bytes_ > 0) return absl::OkStatus();
  // The allocator has no memory, and nothing will come back that this claim could wait for.
  line_.pop_back();
  waiting_bytes_ -= claim->input_bytes;
  return FullLocked(*claim);
}

bool StagingPool::Leave(StagingClaim* claim) {
  MutexLock lock(&mutex_);
  const auto place = std::find(line_.begin(), line_.end(), claim);
  if (place == line_.end()) return true;
  line_.erase(place);
  waiting_bytes_ -= claim->input_bytes;
  ServeLine();  // those behind it may need less
  return false;
}

absl::Status StagingPool::Full(const StagingClaim& claim) const {
  MutexLock lock(&mutex_);
  return FullLocked(claim);
}

absl::Status StagingPool::FullLocked(const StagingClaim& claim) const {
  return absl::ResourceExhaustedError(
      absl::StrCat("staging memory: the request needs ", claim.input_bytes + claim.result_bytes,
                   " bytes; ", used_bytes_, " of ", limit_bytes_, " are in use, and ", line_.size(),
                   " requests wait for them"));
}

bool StagingPool::TryLend(StagingClaim* claim) {
  const size_t input_capacity = Capacity(claim->input_bytes);
  const size_t result_capacity = Capacity(claim->result_bytes);
  if (used_bytes_ + input_capacity + result_capacity > limit_bytes_) return false;
  std::byte* const inputs = Allocate(input_capacity);
  std::byte* const results = Allocate(result_capacity);
  if ((inputs == nullptr && input_capacity > 0) || (results == nullptr && result_capacity > 0)) {
    if (inputs != nullptr) TakeBack(inputs, input_capacity);
    if (results != nullptr) TakeBack(results, result_capacity);
    return false;
  }
  claim->inputs = StagingBuffer(this, inputs, input_capacity);
  claim->results = StagingBuffer(this, results, result_capacity);
  return true;
}

void StagingPool::ServeLine() {
  while (!line_.empty() && TryLend(line_.front())) {
    StagingClaim* const claim = line_.front();
    line_.pop_front();
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
    while (used_bytes_ + free_bytes_ + capacity > limit_bytes_) GiveUpLargest();
    do {
      data = static_cast<std::byte*>(allocator_.allocate(capacity));
      // What is kept may be what the allocator lacks, or lie in its way.
    } while (data == nullptr && GiveUpLargest());
    if (data == nullptr) return nullptr;
  }
  used_bytes_ += capacity;
  return data;
}

bool StagingPool::GiveUpLargest() {
  for (auto it = free_.rbegin(); it != free_.rend(); ++it) {
    if (it->second.empty()) continue;
    allocator_.free(it->second.back());
    it->second.pop_back();
    free_bytes_ -= it->first;
    return true;
  }
  return false;
}

void StagingPool::TakeBack(std::byte* data, size_t capacity) {
  free_[capacity].push_back(data);
  used_bytes_ -= capacity;
  free_bytes_ += capacity;
}

void StagingPool::Return(std::byte* data, size_t capacity) {
  MutexLock lock(&mutex_);
  TakeBack(data, capacity);
  ServeLine();
  // Under the lock: once it is released, a waiting destructor may take the pool away.
  if (used_bytes_ == 0) returned_.NotifyAll();
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
  return line_.size();
}

}  // namespace flashcore::server
