#include "tests/device/device_setting.h"

#include <cstring>

#include "gtest/gtest.h"
#include "server/device/cpu_device.h"
#ifdef FLASHCORE_HAVE_CUDA
#include <cuda_runtime_api.h>

#include "server/device/cuda_device.h"
#endif

namespace flashcore::server::testing {
namespace {

std::unique_ptr<Device> MakeCpu(size_t kv_bytes, size_t kv_hot_bytes, const Clock* clock) {
  CpuDevice::Options options;
  options.threads = 2;
  options.kv_memory_bytes = kv_bytes;
  options.kv_hot_bytes = kv_hot_bytes;
  return CpuDevice::Create(options, clock).value();
}

#ifdef FLASHCORE_HAVE_CUDA
std::string WhyNoGpu() { return std::string(CudaDevice::Find(0).message()); }

CudaDevice::Options CudaOptions(size_t kv_bytes, size_t kv_hot_bytes) {
  CudaDevice::Options options;
  options.lanes = 3;
  options.kv_memory_bytes = kv_bytes;
  using L2Window = CudaDevice::L2Window;
  options.l2_window = kv_hot_bytes > 0 ? L2Window::kOn : L2Window::kOff;
  options.l2_budget_bytes = kv_hot_bytes;
  options.superblock_bytes = kSuperblockBytes;
  return options;
}

std::unique_ptr<Device> MakeCuda(size_t kv_bytes, size_t kv_hot_bytes, const Clock* /*clock*/) {
  return CudaDevice::Create(CudaOptions(kv_bytes, kv_hot_bytes)).value();
}

// Has room for any one request of these tests, but not for large batches.
std::unique_ptr<Device> MakeSmallCuda(size_t kv_bytes, size_t kv_hot_bytes,
                                      const Clock* /*clock*/) {
  CudaDevice::Options options = CudaOptions(kv_bytes, kv_hot_bytes);
  options.max_request_bytes = size_t{512} << 10;
  options.workspace_bytes = size_t{128} << 10;
  options.list_bytes = 4096;
  options.direct_io_bytes = 4096;
  return CudaDevice::Create(options).value();
}

void CopyOnGpu(void* to, const void* from, size_t bytes) {
  EXPECT_EQ(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);  // copies within the GPU return early
}
#endif

}  // namespace

void CopyOnHost(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

std::vector<DeviceSetting> RealDevices() {
  return {
      {"cpu", [] { return std::string(); }, MakeCpu, CopyOnHost},
#ifdef FLASHCORE_HAVE_CUDA
      {"cuda", WhyNoGpu, MakeCuda, CopyOnGpu},
      {"cuda_in_parts", WhyNoGpu, MakeSmallCuda, CopyOnGpu},
#endif
  };
}

}  // namespace flashcore::server::testing
