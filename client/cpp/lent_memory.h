// Memory of a caller that gRPC sends from where it lies. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_LENT_MEMORY_H_
#define FLASHCORE_CLIENT_CPP_LENT_MEMORY_H_

#include <cstddef>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "grpcpp/support/slice.h"

namespace flashcore::client {

// Destroy it after the messages that have its slices, and when no RPC is left that sends them. gRPC
// may then still hold some for a moment: an RPC ends (with an early refusal, its deadline or a
// cancel) only once the write under way has, but the thread that wrote lets go of the slices after
// that. Thread-safe.
class LentMemory {
 public:
  LentMemory() = default;
  ~LentMemory();  // waits until gRPC has dropped every slice
  LentMemory(const LentMemory&) = delete;
  LentMemory& operator=(const LentMemory&) = delete;

  // `memory` is not empty, and outlives this object.
  grpc::Slice Lend(absl::Span<const std::byte> memory) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Return() ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Mutex mutex_;
  int slices_ ABSL_GUARDED_BY(mutex_) = 0;  // with gRPC
};

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_LENT_MEMORY_H_
