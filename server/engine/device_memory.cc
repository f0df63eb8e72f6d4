#include "server/engine/device_memory.h"

#include <algorithm>
#include <utility>

#include "server/memory/block_allocator.h"

namespace flashcore::server {
namespace {

// GPUs give memory in such pieces, so a client is charged for them.
constexpr size_t kPieceBytes = size_t{2} << 20;

}  // namespace

DeviceMemory::DeviceMemory(const Options& options, Fleet* fleet, Gauge* bytes, Gauge* regions)
    : fleet_(fleet),
      budget_(options,
              {"device memory", "client_device_tensor_bytes", "client_device_tensor_regions"},
              bytes, regions) {}

absl::StatusOr<DeviceMemory::Allocation> DeviceMemory::Allocate(
    size_t bytes, absl::string_view device_id, const std::string& client,
    RegionBudget::OnGiveBack on_give_back) {
  if (options().total_bytes == 0) {
    return absl::UnimplementedError(
        "device memory: the server runs without --local_device_tensors");
  }
  if (bytes == 0) return absl::InvalidArgumentError("bytes: 0; want at least 1");
  Allocation made;
  const auto allocate = [&]() -> absl::StatusOr<RegionBudget::Region> {
    auto memory = fleet_->AllocateShared(device_id, bytes);
    if (!memory.ok()) return memory.status();
    made.file = std::move(memory->file);
    made.uuid = fleet_->engines()[memory->region->device()]->device().info().uuid;
    return std::move(memory->region);
  };
  const size_t charged = AlignUp(std::min(bytes, SIZE_MAX - kPieceBytes), kPieceBytes);
  auto region = budget_.Share(charged, client, std::move(on_give_back), allocate);
  if (!region.ok()) return region.status();
  made.region = *std::move(region);
  return made;
}

}  // namespace flashcore::server
