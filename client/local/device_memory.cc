#include "client/local/device_memory.h"

#include <cstring>

#include "client/local/fields.h"

namespace flashcore::client::local {
namespace {

Status BadReply(const std::string& problem) { return {kInternal, "reply: " + problem, ""}; }

}  // namespace

Status DeviceMemory::Allocate(Connection* connection, uint64_t bytes, std::string_view device_id,
                              SteadyTime deadline, DeviceMemory* memory) {
  constexpr uint32_t kBytes = 1, kDeviceId = 2;  // of LocalAllocateDeviceMemory
  if (bytes == 0) return {kInvalidArgument, "bytes: 0; want at least 1", ""};
  DeviceMemory made;
  Status status = CudaDriver::Get(&made.driver_);
  if (!status.ok()) return status;
  Writer action;
  action.Number(kBytes, bytes).Bytes(kDeviceId, device_id);
  Connection::Reply reply;
  status = connection->Exchange(Connection::kAllocateDeviceMemory, action.message(), -1, deadline,
                                &reply);
  if (!status.ok()) return status;
  status = made.Import(bytes, reply);
  if (status.ok()) {
    *memory = std::move(made);
  } else if (!made.region_id_.empty()) {
    connection->Unregister(made.region_id_);
  }
  return status;
}

Status DeviceMemory::Import(uint64_t bytes, const Connection::Reply& reply) {
  constexpr uint32_t kIdField = 1, kBytesField = 2, kUuidField = 3;
  region_id_ = BytesField(reply.result, kIdField);
  if (region_id_.size() != Connection::kRegionIdBytes) {
    return BadReply("a region_id of " + std::to_string(region_id_.size()) + " bytes");
  }
  const std::string uuid_bytes = BytesField(reply.result, kUuidField);
  if (uuid_bytes.size() != sizeof(uuid_.bytes)) {
    return BadReply("a device_uuid of " + std::to_string(uuid_bytes.size()) + " bytes");
  }
  std::memcpy(uuid_.bytes, uuid_bytes.data(), sizeof(uuid_.bytes));
  bytes_ = NumberField(reply.result, kBytesField);
  if (bytes_ < bytes) {
    return BadReply(std::to_string(bytes_) + " bytes of device memory, for " +
                    std::to_string(bytes));
  }
  if (reply.file.get() < 0) return BadReply("device memory without a file descriptor");
  return Map(reply.file);
}

Status DeviceMemory::Map(const File& file) {
  constexpr int kFileDescriptor = 1;          // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
  constexpr int kDevice = 1, kReadWrite = 3;  // CU_MEM_LOCATION_TYPE_, CU_MEM_ACCESS_FLAGS_PROT_
  const CudaDriver& driver = *driver_;
  Status status = driver.FindDevice(uuid_, &ordinal_, &device_);
  if (!status.ok()) return status;
  status =
      driver.Check(driver.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  if (!status.ok()) return status;
  const CurrentContext current(driver, context_);
  if (!current.status().ok()) return current.status();
  status =
      driver.Check(driver.cuMemAddressReserve(&address_, bytes_, 0, 0, 0), "cuMemAddressReserve");
  if (!status.ok()) return status;
  CuAllocation allocation = 0;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver takes the number as a pointer
  void* const handle = reinterpret_cast<void*>(static_cast<intptr_t>(file.get()));
  status = driver.Check(driver.cuMemImportFromShareableHandle(&allocation, handle, kFileDescriptor),
                        "cuMemImportFromShareableHandle");
  if (!status.ok()) return status;
  status = driver.Check(driver.cuMemMap(address_, bytes_, 0, allocation, 0), "cuMemMap");
  mapped_ = status.ok();
  driver.cuMemRelease(allocation);  // the mapping keeps the memory
  if (!status.ok()) return status;
  const CuMemAccess access = {kDevice, device_, kReadWrite};
  return driver.Check(driver.cuMemSetAccess(address_, bytes_, &access, 1), "cuMemSetAccess");
}

DeviceMemory::~DeviceMemory() {
  if (context_ == nullptr) return;
  {
    const CurrentContext current(*driver_, context_);
    if (mapped_) driver_->cuMemUnmap(address_, bytes_);
    if (address_ != 0) driver_->cuMemAddressFree(address_, bytes_);
  }
  driver_->cuDevicePrimaryCtxRelease(device_);
}

}  // namespace flashcore::client::local
