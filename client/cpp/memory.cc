#include "client/cpp/memory.h"

#include <iterator>
#include <utility>

namespace flashcore::client {

constexpr size_t kAlignment = 16;  // of MemoryRange.offset

BorrowedMemory::~BorrowedMemory() {
  absl::MutexLock lock(&mutex_);
  const auto all_released = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return slices_ == 0; };
  mutex_.Await(absl::Condition(&all_released));
}

grpc::Slice BorrowedMemory::Acquire(absl::Span<const std::byte> memory) {
  {
    absl::MutexLock lock(&mutex_);
    ++slices_;
  }
  // A slice takes a mutable pointer, but what is sent is only read.
  return grpc::Slice(
      const_cast<std::byte*>(memory.data()), memory.size(),
      [](void* borrowed) { static_cast<BorrowedMemory*>(borrowed)->Release(); }, this);
}

void BorrowedMemory::Release() {
  absl::MutexLock lock(&mutex_);
  --slices_;
}

void RegionTable::Add(const void* data, Region region) {
  absl::MutexLock lock(&mutex_);
  regions_[static_cast<const std::byte*>(data)] = std::move(region);
}

void RegionTable::Remove(const void* data) {
  absl::MutexLock lock(&mutex_);
  regions_.erase(static_cast<const std::byte*>(data));
}

bool RegionTable::Find(const void* data, size_t bytes, bool to_write,
                       v1::MemoryRange* range) const {
  if (bytes == 0) return false;
  const auto* const first = static_cast<const std::byte*>(data);
  absl::ReaderMutexLock lock(&mutex_);
  const auto after = regions_.upper_bound(first);
  if (after == regions_.begin()) return false;
  const auto& [start, region] = *std::prev(after);
  const auto offset = static_cast<size_t>(first - start);
  const bool inside = bytes <= region.bytes && offset <= region.bytes - bytes;
  if (!inside || offset % kAlignment != 0 || (to_write && region.read_only)) return false;
  range->set_region_id(region.id);
  range->set_offset(offset);
  range->set_bytes(bytes);
  return true;
}

}  // namespace flashcore::client
