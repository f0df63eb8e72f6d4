#include "server/device/cuda_shared_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/device/cuda_driver.h"
#include "server/device/cuda_resources.h"
#include "server/memory/block_allocator.h"

namespace flashcore::server {
namespace {

// A mapped allocation, or a part of one while it is made: each step is undone if it was done.
class Allocation {
 public:
  Allocation(const CudaDriver& driver, int ordinal) : driver_(driver) {
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
    properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  ~Allocation() {
    (void)cudaSetDevice(properties_.location.id);
    if (is_mapped_) driver_.unmap(address_, bytes_);
    if (address_ != 0) driver_.free_reserved(address_, bytes_);
    if (is_created_) driver_.release(handle_);
  }

  absl::Status Make(size_t bytes) {
    size_t granularity = 0;
    absl::Status status =
        Check(driver_.get_granularity(&granularity, &properties_, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
              "cuMemGetAllocationGranularity");
    if (!status.ok()) return status;
    bytes_ = AlignUp(bytes, granularity);
    status = Check(driver_.create(&handle_, bytes_, &properties_, 0),
                   absl::StrCat("cuMemCreate of ", bytes_, " bytes for a client's tensors"));
    if (!status.ok()) return status;
    is_created_ = true;
    status = Check(driver_.reserve(&address_, bytes_, granularity, 0, 0), "cuMemAddressReserve");
    if (!status.ok()) return status;
    status = Check(driver_.map(address_, bytes_, 0, handle_, 0), "cuMemMap");
    if (!status.ok()) return status;
    is_mapped_ = true;
    const CUmemAccessDesc access = {properties_.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    status = Check(driver_.set_access(address_, bytes_, &access, 1), "cuMemSetAccess");
    return status.ok() ? Clear() : status;
  }

  absl::StatusOr<FileDescriptor> Export() const {
    int file = -1;
    absl::Status status =
        Check(driver_.export_handle(&file, handle_, properties_.requestedHandleTypes, 0),
              "cuMemExportToShareableHandle");
    if (!status.ok()) return status;
    return FileDescriptor(file);
  }

  std::byte* data() const {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver's addresses are numbers
    return reinterpret_cast<std::byte*>(address_);
  }
  size_t bytes() const { return bytes_; }

 private:
  absl::Status Check(CUresult result, absl::string_view call) const {
    return driver_.StatusOf(result, call);
  }
  // Another client may have had it.
  absl::Status Clear() const {
    const cudaError_t error = cudaMemset(data(), 0, bytes_);
    return CudaStatus(error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error,
                      "cudaMemset of a client's memory");
  }

  const CudaDriver& driver_;
  CUmemAllocationProp properties_ = {};
  size_t bytes_ = 0;
  CUmemGenericAllocationHandle handle_ = 0;
  CUdeviceptr address_ = 0;
  bool is_created_ = false;
  bool is_mapped_ = false;
};

class AllocatedRegion final : public SharedRegion {
 public:
  explicit AllocatedRegion(std::unique_ptr<Allocation> allocation)
      : SharedRegion(allocation->data(), allocation->bytes(), /*read_only=*/false),
        allocation_(std::move(allocation)) {
    set_in_reach(true);
  }

 private:
  const std::unique_ptr<Allocation> allocation_;
};

}  // namespace

absl::StatusOr<Device::SharedMemory> AllocateCudaShared(int ordinal, size_t bytes) {
  const absl::StatusOr<const CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  auto allocation = std::make_unique<Allocation>(**driver, ordinal);
  if (absl::Status status = allocation->Make(bytes); !status.ok()) return status;
  absl::StatusOr<FileDescriptor> file = allocation->Export();
  if (!file.ok()) return file.status();
  return Device::SharedMemory{std::make_unique<AllocatedRegion>(std::move(allocation)),
                              *std::move(file)};
}

}  // namespace flashcore::server
