// The driver of NVIDIA GPUs, loaded when it is first used: so the clients are built, and work,
// without CUDA. Internal to the clients.
#ifndef FLASHCORE_CLIENT_LOCAL_CUDA_H_
#define FLASHCORE_CLIENT_LOCAL_CUDA_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "client/local/status.h"

namespace flashcore::client::local {

// Types of cuda.h. Results are CUresult, 0 for success.
using CuContext = void*;
using CuStream = void*;
using CuAddress = uint64_t;     // CUdeviceptr
using CuAllocation = uint64_t;  // CUmemGenericAllocationHandle
struct CuUuid {
  uint8_t bytes[16];
};
struct CuMemAccess {  // CUmemAccessDesc
  int location_type, location_id, flags;
};
struct CuMemOp {  // CUstreamBatchMemOpParams
  uint32_t operation;
  CuAddress address;
  uint64_t value;
  uint32_t flags;
  CuAddress alias;
  uint64_t reserved;
};
static_assert(sizeof(CuMemOp) == 48);

// The functions of a driver of CUDA 12.0 or later. Each of a name with several versions is the one
// that cuda.h of CUDA 12 means.
struct CudaDriver {
  // Loads and initialises it with the first call of this process. UNIMPLEMENTED without a driver.
  static Status Get(const CudaDriver** driver);

  // OK if `result` is 0. Else an error with `function`, the driver's text and what helps.
  Status Check(int result, const char* function) const;

  // The GPU of this UUID. FAILED_PRECONDITION, with those that it sees, if this process does not.
  Status FindDevice(const CuUuid& uuid, int* ordinal, int* device) const;

  int (*cuInit)(unsigned flags);
  int (*cuGetErrorString)(int result, const char** text);
  int (*cuDeviceGetCount)(int* count);
  int (*cuDeviceGet)(int* device, int ordinal);
  int (*cuDeviceGetUuid)(CuUuid* uuid, int device);
  int (*cuDevicePrimaryCtxRetain)(CuContext* context, int device);
  int (*cuDevicePrimaryCtxRelease)(int device);
  int (*cuCtxPushCurrent)(CuContext context);
  int (*cuCtxPopCurrent)(CuContext* context);
  int (*cuMemImportFromShareableHandle)(CuAllocation* allocation, void* handle, int type);
  int (*cuMemAddressReserve)(CuAddress* address, size_t bytes, size_t alignment, CuAddress hint,
                             uint64_t flags);
  int (*cuMemAddressFree)(CuAddress address, size_t bytes);
  int (*cuMemMap)(CuAddress address, size_t bytes, size_t offset, CuAllocation allocation,
                  uint64_t flags);
  int (*cuMemUnmap)(CuAddress address, size_t bytes);
  int (*cuMemSetAccess)(CuAddress address, size_t bytes, const CuMemAccess* access, size_t count);
  int (*cuMemRelease)(CuAllocation allocation);
  int (*cuMemHostRegister)(void* data, size_t bytes, unsigned flags);
  int (*cuMemHostUnregister)(void* data);
  int (*cuMemHostGetDevicePointer)(CuAddress* address, void* data, unsigned flags);
  int (*cuPointerGetAttribute)(void* value, int attribute, CuAddress address);
  int (*cuStreamGetCtx)(CuStream stream, CuContext* context);
  int (*cuStreamGetId)(CuStream stream, uint64_t* id);
  int (*cuStreamIsCapturing)(CuStream stream, int* state);
  int (*cuStreamBatchMemOp)(CuStream stream, unsigned count, CuMemOp* operations, unsigned flags);
};

// Whether `data` is memory of a GPU, which the host cannot read. False in a process that has not
// used CudaDriver::Get: it has no memory of these clients.
bool OnGpu(const void* data);

// "GPU-01020304-...", as nvidia-smi prints it.
std::string UuidText(const CuUuid& uuid);

// Makes a context current on this thread while it exists.
class CurrentContext {
 public:
  CurrentContext(const CudaDriver& driver, CuContext context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  const Status& status() const { return status_; }  // not OK: it is not current

 private:
  const CudaDriver& driver_;
  const Status status_;
};

// Host memory that the streams of all contexts reach. May be empty.
class PinnedMemory {
 public:
  // `data` is page-aligned, and outlives it. `context` is that of the first stream.
  static Status Pin(const CudaDriver& driver, CuContext context, void* data, size_t bytes,
                    PinnedMemory* pinned);
  PinnedMemory() = default;
  PinnedMemory(PinnedMemory&& other) noexcept { *this = std::move(other); }
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(context_, other.context_);
    std::swap(data_, other.data_);
    std::swap(address_, other.address_);
    return *this;
  }
  // CUDA waits here for work on the GPU, as in cudaFree.
  ~PinnedMemory();

  CuAddress address() const { return address_; }  // of `data`, for GPUs

 private:
  const CudaDriver* driver_ = nullptr;
  CuContext context_ = nullptr;
  void* data_ = nullptr;
  CuAddress address_ = 0;
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_LOCAL_CUDA_H_
