#include "server/core/staging_pool.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace flashcore::server {
namespace {

constexpr size_t kSmallestClass = 4096;

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

StagingPool::StagingPool(size_t limit_bytes, Allocator allocator)
    : limit_bytes_(limit_bytes), allocator_(std::move(allocator)) {}

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

absl::StatusOr<StagingBuffer> StagingPool::Lend(size_t bytes) {
  if (bytes == 0) return StagingBuffer();
  std::byte* data = nullptr;
  size_t capacity = 0;
  size_t used = 0;
  if (bytes <= limit_bytes_) {
    capacity = SizeClass(bytes);
    MutexLock lock(&mutex_);
    data = Allocate(capacity);
    used = used_bytes_;
  }
  if (data == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("staging memory: the request needs ", bytes,
                                                     " bytes; ", used, " of ", limit_bytes_,
                                                     " are in use"));
  }
  return StagingBuffer(this, data, capacity);
}

std::byte* StagingPool::Allocate(size_t capacity) {
  auto kept = free_.find(capacity);
  std::byte* data = nullptr;
  if (kept != free_.end() && !kept->second.empty()) {
    data = kept->second.back();
    kept->second.pop_back();
    free_bytes_ -= capacity;
  } else {
    if (capacity > limit_bytes_ || used_bytes_ > limit_bytes_ - capacity) return nullptr;
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

void StagingPool::Return(std::byte* data, size_t capacity) {
  MutexLock lock(&mutex_);
  free_[capacity].push_back(data);
  used_bytes_ -= capacity;
  free_bytes_ += capacity;
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

}  // namespace flashcore::server
