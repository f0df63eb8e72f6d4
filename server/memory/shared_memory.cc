#include "server/memory/shared_memory.h"

#include <utility>

#include "server/telemetry/log.h"

namespace flashcore::server {

SharedMemory::SharedMemory(const Options& options, const HostMemoryPinner* pinner, Gauge* bytes,
                           Gauge* regions)
    : budget_(options, {"shared memory", "client_shared_memory_bytes", "client_shared_regions"},
              bytes, regions),
      pinner_(pinner) {}

absl::StatusOr<std::shared_ptr<const SharedRegion>> SharedMemory::Map(
    const FileDescriptor& file, uint64_t bytes, bool read_only, const std::string& client,
    RegionBudget::OnGiveBack on_give_back) {
  if (absl::Status status = SharedRegion::CheckFile(file, bytes); !status.ok()) return status;
  const auto map = [&]() -> absl::StatusOr<RegionBudget::Region> {
    auto mapped = SharedRegion::Map(file, bytes, read_only);
    if (!mapped.ok()) return mapped.status();
    const absl::Status pinned = pinner_->PinHostMemory((*mapped)->data(), bytes, read_only);
    (*mapped)->set_in_reach(pinned.ok());
    if (!pinned.ok()) {
      LogWarning("shared memory is not pinned: it is copied in pieces, and never read in place",
                 {{"bytes", bytes}, {"error", pinned.message()}});
    }
    return mapped;
  };
  auto region = budget_.Share(bytes, client, std::move(on_give_back), map);
  if (!region.ok() || !(*region)->in_reach()) return region;
  const SharedRegion* const pinned = region->get();
  return std::shared_ptr<const SharedRegion>(
      pinned, [this, region = *std::move(region)](const SharedRegion* unused) {
        pinner_->UnpinHostMemory(unused->data());
      });
}

}  // namespace flashcore::server
