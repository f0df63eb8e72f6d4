#include "client/cpp/lent_memory.h"

namespace flashcore::client {

LentMemory::~LentMemory() {
  absl::MutexLock lock(&mutex_);
  const auto all_returned = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return slices_ == 0; };
  mutex_.Await(absl::Condition(&all_returned));
}

grpc::Slice LentMemory::Lend(absl::Span<const std::byte> memory) {
  {
    absl::MutexLock lock(&mutex_);
    ++slices_;
  }
  // A slice takes a mutable pointer, but what is sent is only read.
  return grpc::Slice(
      const_cast<std::byte*>(memory.data()), memory.size(),
      [](void* lent) { static_cast<LentMemory*>(lent)->Return(); }, this);
}

void LentMemory::Return() {
  absl::MutexLock lock(&mutex_);
  --slices_;
}

}  // namespace flashcore::client
