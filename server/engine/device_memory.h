// Memory of the devices for tensors that clients on this host read and write in place.
#ifndef FLASHCORE_SERVER_ENGINE_DEVICE_MEMORY_H_
#define FLASHCORE_SERVER_ENGINE_DEVICE_MEMORY_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/socket.h"
#include "server/engine/fleet.h"
#include "server/memory/region_budget.h"
#include "server/telemetry/metric.h"

namespace flashcore::server {

// All devices share one budget. Outlives its regions. Thread-safe.
class DeviceMemory {
 public:
  // 0 bytes in total: there is none.
  using Options = RegionBudget::Options;

  struct Allocation {
    std::shared_ptr<const SharedRegion> region;
    FileDescriptor file;  // for the client
    std::string uuid;     // of the device: 16 bytes
  };

  // `bytes` and `regions` follow the regions. All outlive this.
  DeviceMemory(const Options& options, Fleet* fleet, Gauge* bytes, Gauge* regions);

  const Options& options() const { return budget_.options(); }

  // At least `bytes` on the device named `device_id`, for `client`; takes milliseconds.
  // UNIMPLEMENTED if clients get none; INVALID_ARGUMENT for 0 bytes; other errors as of
  // RegionBudget::Share and Fleet::AllocateShared.
  absl::StatusOr<Allocation> Allocate(size_t bytes, absl::string_view device_id,
                                      const std::string& client,
                                      RegionBudget::OnGiveBack on_give_back);

 private:
  Fleet* const fleet_;
  RegionBudget budget_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ENGINE_DEVICE_MEMORY_H_
