// The functions of the CUDA driver that the server uses. Memory that is shared with clients is a
// memfd: a client of a fake GPU maps it by its file descriptor.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/device/fake_gpu.h"
#include "tests/device/fake_gpu_state.h"

namespace flashcore::server::testing {
namespace fake_gpu {
namespace {

constexpr size_t kGranularity = size_t{2} << 20;

std::atomic<int> shared_resources{0};

struct Allocation {
  int memfd;
  size_t bytes;
  int gpu;
};
std::mutex allocations_mutex;
std::map<CUmemGenericAllocationHandle, Allocation> allocations;  // guarded by allocations_mutex
CUmemGenericAllocationHandle last_handle = 0;                    // guarded by allocations_mutex

CUresult Next() { return driver_fault.Next() == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN; }

void* At(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

CUresult GetErrorString(CUresult, const char** text) {
  *text = "a fake driver's error";
  return CUDA_SUCCESS;
}
CUresult GetDevice(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult GetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 1;
  return CUDA_SUCCESS;
}
CUresult GetGranularity(size_t* bytes, const CUmemAllocationProp*,
                        CUmemAllocationGranularity_flags) {
  *bytes = kGranularity;
  return Next();
}
CUresult Create(CUmemGenericAllocationHandle* handle, size_t bytes,
                const CUmemAllocationProp* properties, unsigned long long) {
  EXPECT_EQ(bytes % kGranularity, 0u);
  EXPECT_EQ(properties->location.id, CurrentGpu());
  if (bytes > kTotalBytes) return CUDA_ERROR_OUT_OF_MEMORY;
  if (const CUresult result = Next(); result != CUDA_SUCCESS) return result;
  const int memfd = memfd_create("fake GPU", MFD_CLOEXEC);
  if (memfd < 0 || ftruncate(memfd, static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_UNKNOWN;
  std::lock_guard<std::mutex> lock(allocations_mutex);
  *handle = ++last_handle;
  allocations[*handle] = {memfd, bytes, properties->location.id};
  ++shared_resources;
  return CUDA_SUCCESS;
}
CUresult Release(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> lock(allocations_mutex);
  close(allocations.at(handle).memfd);
  allocations.erase(handle);
  --shared_resources;
  return CUDA_SUCCESS;
}
CUresult Export(void* file, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                unsigned long long) {
  EXPECT_EQ(type, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (const CUresult result = Next(); result != CUDA_SUCCESS) return result;
  std::lock_guard<std::mutex> lock(allocations_mutex);
  *static_cast<int*>(file) = fcntl(allocations.at(handle).memfd, F_DUPFD_CLOEXEC, 0);
  return CUDA_SUCCESS;
}
CUresult Reserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  if (const CUresult result = Next(); result != CUDA_SUCCESS) return result;
  void* const reserved =
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return CUDA_ERROR_UNKNOWN;
  *address = reinterpret_cast<CUdeviceptr>(reserved);
  ++shared_resources;
  return CUDA_SUCCESS;
}
CUresult FreeReserved(CUdeviceptr address, size_t bytes) {
  munmap(At(address), bytes);
  --shared_resources;
  return CUDA_SUCCESS;
}
CUresult Map(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
             unsigned long long) {
  if (const CUresult result = Next(); result != CUDA_SUCCESS) return result;
  int gpu = 0;
  {
    std::lock_guard<std::mutex> lock(allocations_mutex);
    const Allocation& allocation = allocations.at(handle);
    EXPECT_EQ(bytes, allocation.bytes);
    gpu = allocation.gpu;
    EXPECT_NE(mmap(At(address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                   allocation.memfd, 0),
              MAP_FAILED);
  }
  std::lock_guard<std::mutex> lock(memory_mutex);
  device_memory[static_cast<std::byte*>(At(address))] = {bytes, gpu};
  ++shared_resources;
  return CUDA_SUCCESS;
}
CUresult Unmap(CUdeviceptr address, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  device_memory.erase(static_cast<std::byte*>(At(address)));
  mmap(At(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
       0);
  --shared_resources;
  return CUDA_SUCCESS;
}
CUresult SetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return Next(); }

CUresult BatchMemOp(CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations,
                    unsigned) {
  if (const CUresult result = Next(); result != CUDA_SUCCESS) return result;
  std::vector<std::pair<std::atomic<uint64_t>*, uint64_t>> writes;
  for (unsigned i = 0; i < count; ++i) {
    EXPECT_EQ(operations[i].operation, CU_STREAM_MEM_OP_WRITE_VALUE_64);
    void* const at = At(operations[i].writeValue.address);
    ExpectInReach(at, "a counter");
    writes.emplace_back(static_cast<std::atomic<uint64_t>*>(at), operations[i].writeValue.value64);
  }
  const cudaError_t error = Push(stream, [writes = std::move(writes)] {
    for (const auto& [at, value] : writes) at->store(value);
  });
  return error == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

void* Find(std::string_view name) {
  static const std::map<std::string_view, void*> functions = {
      {"cuGetErrorString", reinterpret_cast<void*>(GetErrorString)},
      {"cuDeviceGet", reinterpret_cast<void*>(GetDevice)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(GetAttribute)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(GetGranularity)},
      {"cuMemCreate", reinterpret_cast<void*>(Create)},
      {"cuMemRelease", reinterpret_cast<void*>(Release)},
      {"cuMemExportToShareableHandle", reinterpret_cast<void*>(Export)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(Reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(FreeReserved)},
      {"cuMemMap", reinterpret_cast<void*>(Map)},
      {"cuMemUnmap", reinterpret_cast<void*>(Unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(SetAccess)},
      {"cuStreamBatchMemOp", reinterpret_cast<void*>(BatchMemOp)},
  };
  const auto found = functions.find(name);
  return found == functions.end() ? nullptr : found->second;
}

}  // namespace

extern "C" {

#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult*) {
  *function = Find(name);
  return cudaSuccess;
}
#else
cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long,
                                    cudaDriverEntryPointQueryResult*) {
  *function = Find(name);
  return cudaSuccess;
}
#endif

}  // extern "C"
}  // namespace fake_gpu

int FakeGpuSharedResources() { return fake_gpu::shared_resources; }

}  // namespace flashcore::server::testing
