// Memory that clients on this host share with the server: their mapped POSIX segments.
#ifndef FLASHCORE_SERVER_MEMORY_SHARED_MEMORY_H_
#define FLASHCORE_SERVER_MEMORY_SHARED_MEMORY_H_

#include <cstddef>
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

// Where the regions of MemoryRanges are looked up. Thread-safe.
class RegionSource {
 public:
  virtual ~RegionSource() = default;
  // NOT_FOUND, also if it is the region of another client.
  virtual absl::StatusOr<std::shared_ptr<const SharedRegion>> Find(
      absl::string_view id, absl::string_view client) const = 0;
};

// The registered regions. An unregistered region stays mapped, and counts against the limits,
// until the last request that uses it has ended. Outlives its regions. Thread-safe.
class SharedMemory final : public RegionSource {
 public:
  struct Options {
    bool allowed = false;                  // over gRPC, by RegisterMemory
    size_t total_bytes = size_t{1} << 30;  // of all regions
    size_t client_bytes = 0;               // of all regions of a client; 0: no limit
    size_t client_regions = 64;            // per client
  };

  // `pinner` pins each region. `bytes` and `regions` follow the mapped regions. All outlive this.
  SharedMemory(const Options& options, const HostMemoryPinner* pinner, Gauge* bytes,
               Gauge* regions);
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  const Options& options() const { return options_; }

  // Maps and pins `segment` for `client`, which it counts for until it is destroyed.
  // RESOURCE_EXHAUSTED beyond a limit.
  absl::StatusOr<std::shared_ptr<const SharedRegion>> Map(SharedSegment segment,
                                                          const std::string& client);
  // As Map, and makes it known to Find. Returns the region's id: kIdBytes random bytes.
  absl::StatusOr<std::string> Register(SharedSegment segment, const std::string& client);
  void Unregister(const std::string& id);

  absl::StatusOr<std::shared_ptr<const SharedRegion>> Find(absl::string_view id,
                                                           absl::string_view client) const override;

  static constexpr size_t kIdBytes = 16;
  static std::string RandomId();  // from the operating system

 private:
  struct Account {
    size_t bytes = 0;
    size_t regions = 0;
  };
  struct Registration {
    std::string client;
    std::shared_ptr<const SharedRegion> region;
  };

  absl::Status Acquire(size_t bytes, const std::string& client) ABSL_LOCKS_EXCLUDED(mutex_);
  void Release(size_t bytes, const std::string& client) ABSL_LOCKS_EXCLUDED(mutex_);

  const Options options_;
  const HostMemoryPinner* const pinner_;
  Gauge* const bytes_gauge_;
  Gauge* const regions_gauge_;
  mutable Mutex mutex_;
  size_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::string, Account> accounts_ ABSL_GUARDED_BY(mutex_);      // by client
  absl::flat_hash_map<std::string, Registration> regions_ ABSL_GUARDED_BY(mutex_);  // by id
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_MEMORY_SHARED_MEMORY_H_
