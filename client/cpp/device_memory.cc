#include "flashcore/device_memory.h"

#include <utility>

#include "client/cpp/connection.h"
#include "client/cpp/transport.h"
#include "client/local/cuda.h"
#include "client/local/device_memory.h"

namespace flashcore {

absl::StatusOr<DeviceMemory> DeviceMemory::Allocate(
    std::shared_ptr<const client::Connection> connection, size_t bytes,
    const std::string& device_id, const CallOptions& call) {
  if (absl::Status status = connection->CheckProcess(); !status.ok()) return status;
  if (bytes == 0) return absl::InvalidArgumentError("bytes: 0; want at least 1");
  auto memory = connection->transport().AllocateDeviceMemory(
      bytes, device_id, {connection->Deadline(call), call.affinity});
  if (!memory.ok()) return memory.status();
  return DeviceMemory(std::move(connection), *std::move(memory));
}

DeviceMemory::DeviceMemory(std::shared_ptr<const client::Connection> connection,
                           std::shared_ptr<const client::local::DeviceMemory> memory)
    : connection_(std::move(connection)), memory_(std::move(memory)) {}

void DeviceMemory::Release() {
  if (connection_ == nullptr) return;
  if (connection_->OfThisProcess()) connection_->transport().RemoveDeviceMemory(memory_.get());
  memory_.reset();
  connection_.reset();
}

std::byte* DeviceMemory::address() const {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver gives a number
  return reinterpret_cast<std::byte*>(memory_->address());
}

size_t DeviceMemory::bytes() const { return memory_->bytes(); }

int DeviceMemory::ordinal() const { return memory_->ordinal(); }

std::string DeviceMemory::device_uuid() const { return client::local::UuidText(memory_->uuid()); }

bool DeviceMemory::registered() const {
  return connection_->OfThisProcess() && connection_->transport().HasDeviceMemory(memory_.get());
}

}  // namespace flashcore
