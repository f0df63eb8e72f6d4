// Memory that clients on this host share with the server: their POSIX segments, mapped.
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
#include "absl/strings/string_view.h"
#include "server/base/mutex.h"
#include "server/memory/shared_region.h"
#include "server/telemetry/metric.h"

namespace flashcore::server {

// Makes host memory that the server does not own reachable for kernels.
class HostMemoryPinner {
 public:
  virtual ~HostMemoryPinner() = default;

  // After OK, kernels of every device of this kind read and write [data, data + bytes) at its own
  // address (with `read_only`, they only read it), and copies to and from it need no intermediate
  // buffer. After an error, copies still work. Slow: takes milliseconds. Thread-safe.
  virtual absl::Status PinHostMemory(std::byte* data, size_t bytes, bool read_only) const = 0;
  // Undoes PinHostMemory. Call it before the memory is unmapped and when nothing uses it any more.
  virtual void UnpinHostMemory(std::byte* data) const = 0;
};

// The regions that are registered. A region that has been unregistered stays mapped, and counts,
// until the last request in it has ended. Outlives its regions. Thread-safe.
class SharedMemory {
 public:
  struct Options {
    bool allowed = false;
    size_t total_bytes = size_t{1} << 30;  // of all regions
    size_t client_bytes = 0;               // of the regions of one client; 0: no limit
    size_t client_regions = 64;            // of one client
  };

  // `pinner` pins each region. `bytes` and `regions` are kept current. All outlive this.
  SharedMemory(const Options& options, const HostMemoryPinner* pinner, Gauge* bytes,
               Gauge* regions);
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  const Options& options() const { return options_; }

  // Maps and pins `segment`; returns the region's id, kIdBytes that nobody can guess.
  // RESOURCE_EXHAUSTED over a limit.
  absl::StatusOr<std::string> Register(SharedSegment segment, const std::string& client);
  void Unregister(const std::string& id);

  // NOT_FOUND.
  absl::StatusOr<std::shared_ptr<const SharedRegion>> Find(absl::string_view id) const;

  static constexpr size_t kIdBytes = 16;
  static std::string RandomId();  // of the operating system's source

 private:
  struct Account {
    size_t bytes = 0;
    size_t regions = 0;
  };

  absl::Status Take(size_t bytes, const std::string& client) ABSL_LOCKS_EXCLUDED(mutex_);
  void GiveBack(size_t bytes, const std::string& client) ABSL_LOCKS_EXCLUDED(mutex_);

  const Options options_;
  const HostMemoryPinner* const pinner_;
  Gauge* const bytes_gauge_;
  Gauge* const regions_gauge_;
  mutable Mutex mutex_;
  size_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::string, Account> accounts_ ABSL_GUARDED_BY(mutex_);    // by client
  absl::flat_hash_map<std::string, std::shared_ptr<const SharedRegion>> regions_  // by id
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_MEMORY_SHARED_MEMORY_H_
