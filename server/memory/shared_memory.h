// Host memory that clients on this host share with the server.
#ifndef FLASHCORE_SERVER_MEMORY_SHARED_MEMORY_H_
#define FLASHCORE_SERVER_MEMORY_SHARED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/socket.h"
#include "server/memory/region_budget.h"
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

// Maps what clients share, within a RegionBudget. Outlives its regions. Thread-safe.
class SharedMemory {
 public:
  using Options = RegionBudget::Options;

  // `pinner` pins each region. `bytes` and `regions` follow the mapped regions. All outlive this.
  SharedMemory(const Options& options, const HostMemoryPinner* pinner, Gauge* bytes,
               Gauge* regions);

  const Options& options() const { return budget_.options(); }

  // Maps and pins the first `bytes` of the memfd `file`, which may then be closed, for `client`.
  // Errors as of RegionBudget::Share, SharedRegion::CheckFile and Map.
  absl::StatusOr<std::shared_ptr<const SharedRegion>> Map(
      const FileDescriptor& file, uint64_t bytes, bool read_only, const std::string& client,
      RegionBudget::OnGiveBack on_give_back = nullptr);

 private:
  RegionBudget budget_;
  const HostMemoryPinner* const pinner_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_MEMORY_SHARED_MEMORY_H_
