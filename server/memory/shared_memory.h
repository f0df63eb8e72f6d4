// Memory that clients on this host share with the server.
#ifndef FLASHCORE_SERVER_MEMORY_SHARED_MEMORY_H_
#define FLASHCORE_SERVER_MEMORY_SHARED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/mutex.h"
#include "server/base/socket.h"
#include "server/memory/shared_region.h"
#include "server/telemetry/metric.h"

namespace flashcore::server {

// Makes host memory that the server does not own accessible to kernels.
class HostMemoryPinner {
 public:
  virtual ~HostMemoryPinner() = default;

  // After OK, kernels of every device of this kind can read and write [data, data + bytes) at the
  // host's address (only read, with `read_only`), and copies need no intermediate buffer. After an
  // error, copies still work. Takes milliseconds. Thread-safe.
  virtual absl::Status PinHostMemory(std::byte* data, size_t bytes, bool read_only) const = 0;
  // Undoes PinHostMemory. Call it when nothing uses the memory any more, before it is unmapped.
  virtual void UnpinHostMemory(std::byte* data) const = 0;
};

// Maps what clients share, within limits. Outlives its regions. Thread-safe.
class SharedMemory {
 public:
  struct Options {
    size_t total_bytes = size_t{1} << 30;  // of all regions
    size_t client_bytes = 0;               // of all regions of a client; 0: no limit
    size_t client_regions = 256;           // per client
  };

  // `pinner` pins each region. `bytes` and `regions` follow the mapped regions. All outlive this.
  SharedMemory(const Options& options, const HostMemoryPinner* pinner, Gauge* bytes,
               Gauge* regions);
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  const Options& options() const { return options_; }

  // Maps and pins the first `bytes` of the memfd `file`, which may then be closed, for `client`.
  // The region counts against the limits until the last reference to it is gone. RESOURCE_EXHAUSTED
  // beyond a limit; other errors as of SharedRegion::CheckFile and Map.
  absl::StatusOr<std::shared_ptr<const SharedRegion>> Map(const FileDescriptor& file,
                                                          uint64_t bytes, bool read_only,
                                                          const std::string& client);

 private:
  struct Account {
    size_t bytes = 0;
    size_t regions = 0;
  };
  absl::Status Acquire(size_t bytes, const std::string& client) ABSL_LOCKS_EXCLUDED(mutex_);
  void Release(size_t bytes, const std::string& client) ABSL_LOCKS_EXCLUDED(mutex_);

  const Options options_;
  const HostMemoryPinner* const pinner_;
  Gauge* const bytes_gauge_;
  Gauge* const regions_gauge_;
  mutable Mutex mutex_;
  size_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::string, Account> accounts_ ABSL_GUARDED_BY(mutex_);  // by client
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_MEMORY_SHARED_MEMORY_H_
