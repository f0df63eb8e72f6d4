// Memory of a GPU that the server has allocated, and both sides map. Internal to the clients.
#ifndef FLASHCORE_CLIENT_LOCAL_DEVICE_MEMORY_H_
#define FLASHCORE_CLIENT_LOCAL_DEVICE_MEMORY_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "client/local/connection.h"
#include "client/local/cuda.h"
#include "client/local/status.h"

namespace flashcore::client::local {

// Zeroed, and mapped until it is destroyed, for the primary context of its GPU: that of the CUDA
// runtime and of PyTorch. May be empty.
class DeviceMemory {
 public:
  // At least `bytes`, of a device of the server; empty: its first one. It is a region of the
  // connection, which the caller unregisters. After an error nothing of it is left, here or there.
  static Status Allocate(Connection* connection, uint64_t bytes, std::string_view device_id,
                         SteadyTime deadline, DeviceMemory* memory);
  DeviceMemory() = default;
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(context_, other.context_);
    std::swap(ordinal_, other.ordinal_);
    std::swap(device_, other.device_);
    std::swap(uuid_, other.uuid_);
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
    std::swap(region_id_, other.region_id_);
    return *this;
  }
  ~DeviceMemory();  // no work of the GPU may use it any more

  CuAddress address() const { return address_; }
  uint64_t bytes() const { return bytes_; }
  int ordinal() const { return ordinal_; }  // of its GPU, in this process
  const CuUuid& uuid() const { return uuid_; }
  const std::string& region_id() const { return region_id_; }

 private:
  // `reply` is a LocalAllocateDeviceMemoryResult, with the memory's file. Sets the region's id even
  // if the rest fails.
  Status Import(uint64_t bytes, const Connection::Reply& reply);
  Status Map(const File& file);

  const CudaDriver* driver_ = nullptr;
  CuContext context_ = nullptr;
  int ordinal_ = -1;
  int device_ = -1;
  CuUuid uuid_ = {};
  CuAddress address_ = 0;
  uint64_t bytes_ = 0;
  bool mapped_ = false;
  std::string region_id_;
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_LOCAL_DEVICE_MEMORY_H_
