// Memory of callers that gRPC or the server reads in place. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_MEMORY_H_
#define FLASHCORE_CLIENT_CPP_MEMORY_H_

#include <cstddef>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "flashcore/v1/attention.pb.h"
#include "grpcpp/support/slice.h"

namespace flashcore::client {

// Slices of a caller's memory, for gRPC to send without a copy. Destroy it after the messages that
// have its slices, and when no RPC sends them any more. The destructor waits for slices that gRPC
// still holds: an RPC ends (refused early, by its deadline, or cancelled) only after the write in
// progress, but the thread that wrote releases the slices a moment later. Thread-safe.
class BorrowedMemory {
 public:
  BorrowedMemory() = default;
  ~BorrowedMemory();
  BorrowedMemory(const BorrowedMemory&) = delete;
  BorrowedMemory& operator=(const BorrowedMemory&) = delete;

  // `memory` is not empty, and outlives this object.
  grpc::Slice Acquire(absl::Span<const std::byte> memory) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Release() ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Mutex mutex_;
  int slices_ ABSL_GUARDED_BY(mutex_) = 0;  // that gRPC holds
};

// INVALID_ARGUMENT if `data`, of `tensor`, is on a GPU, so that the host cannot copy it.
absl::Status CheckOnHost(const char* tensor, const void* data);

// The memory that a client shares with a server, by address. Thread-safe.
class RegionTable {
 public:
  struct Region {
    size_t bytes = 0;
    std::string id;          // empty: the server does not have it any more
    bool read_only = false;  // for the server
    bool on_gpu = false;
  };

  void Add(const void* data, Region region);
  void Remove(const void* data);  // does nothing if it is not there

  // True, with the place of `tensor` (its name in errors), `bytes` at `data`, if all of them are in
  // one region, the server has the access it needs, and they are aligned as the contract requires.
  // False, without a place: the host can copy it, or it has no bytes. INVALID_ARGUMENT for a tensor
  // on a GPU that is not so in a region; NOT_FOUND (REGION_LOST) if the server has lost the region.
  absl::StatusOr<bool> Find(const char* tensor, const void* data, size_t bytes, bool to_write,
                            v1::MemoryRange* range) const;

 private:
  mutable absl::Mutex mutex_;
  std::map<const std::byte*, Region> regions_ ABSL_GUARDED_BY(mutex_);  // by first byte
};

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_MEMORY_H_
