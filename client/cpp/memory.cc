#include "client/cpp/memory.h"

#include <iterator>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "client/local/cuda.h"

namespace flashcore::client {

namespace {

constexpr size_t kAlignment = 16;  // of MemoryRange.offset

absl::Status Misplaced(const char* tensor, size_t bytes, size_t offset,
                       const RegionTable::Region& region) {
  return absl::InvalidArgumentError(
      absl::StrCat(tensor, ": ", bytes, " bytes at offset ", offset, " of DeviceMemory of ",
                   region.bytes, " bytes; want all of them in it, at a multiple of ", kAlignment));
}

absl::Status Lost(const char* tensor) {
  absl::Status status = absl::NotFoundError(
      absl::StrCat(tensor, ": in DeviceMemory of a connection that has ended; allocate it again"));
  v1::ErrorInfo info;
  info.set_reason("REGION_LOST");
  info.set_domain("flashcore");
  status.SetPayload("type.googleapis.com/google.rpc.ErrorInfo",
                    absl::Cord(info.SerializeAsString()));
  return status;
}

}  // namespace

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

absl::Status CheckOnHost(const char* tensor, const void* data) {
  if (!local::OnGpu(data)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      tensor,
      ": on a GPU; want host memory, or for an Attend over a local: target DeviceMemory of "
      "this client"));
}

void RegionTable::Add(const void* data, Region region) {
  absl::MutexLock lock(&mutex_);
  regions_[static_cast<const std::byte*>(data)] = std::move(region);
}

void RegionTable::Remove(const void* data) {
  absl::MutexLock lock(&mutex_);
  regions_.erase(static_cast<const std::byte*>(data));
}

absl::StatusOr<bool> RegionTable::Find(const char* tensor, const void* data, size_t bytes,
                                       bool to_write, v1::MemoryRange* range) const {
  if (bytes == 0) return false;
  const auto* const first = static_cast<const std::byte*>(data);
  {
    absl::ReaderMutexLock lock(&mutex_);
    const auto after = regions_.upper_bound(first);
    if (after != regions_.begin()) {
      const auto& [start, region] = *std::prev(after);
      const auto offset = static_cast<size_t>(first - start);
      const bool inside = bytes <= region.bytes && offset <= region.bytes - bytes;
      if (region.on_gpu && offset < region.bytes) {
        if (!inside || offset % kAlignment != 0) return Misplaced(tensor, bytes, offset, region);
        if (region.id.empty()) return Lost(tensor);
      }
      if (inside && offset % kAlignment == 0 && !(to_write && region.read_only)) {
        range->set_region_id(region.id);
        range->set_offset(offset);
        range->set_bytes(bytes);
        return true;
      }
    }
  }
  if (absl::Status status = CheckOnHost(tensor, data); !status.ok()) return status;
  return false;
}

}  // namespace flashcore::client
