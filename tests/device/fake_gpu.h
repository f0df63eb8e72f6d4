// Two GPUs made of host memory, for programs that link fake_gpu.cc in place of the CUDA runtime and
// the CUDA kernels: all of the CUDA device but these runs where there is no GPU.
#ifndef FLASHCORE_TESTS_DEVICE_FAKE_GPU_H_
#define FLASHCORE_TESTS_DEVICE_FAKE_GPU_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "server/device/cuda_device.h"

namespace flashcore::server::testing {

// Times so far that somebody asked for an event that was not there yet.
int FakeGpuPolls();

// Copies so far between host and device memory that were enqueued on a stream.
int FakeGpuCopies();

// Every later kernel launch returns `error`, until told cudaSuccess.
void FailFakeGpuLaunches(cudaError_t error);

// Bytes that the newest access-policy window of any stream covers.
size_t FakeGpuWindowBytes();

// Bytes of the L2 of GPU 0 that are set aside, and how often persisting lines were reset.
size_t FakeGpuSetAsideBytes();
int FakeGpuL2Resets();

// What any work of a stream that has a window takes from now on; at first 0.25, as without one.
// Beside: if another stream, which it waited for, was given more to do after what it waited for.
void SetFakeGpuWindowedTimes(float ms, float ms_beside);

// Of a device with 16 MiB for K/V, that lanes of 1 MiB each serve.
inline CudaDevice::Options SmallOptions() {
  constexpr size_t kMiB = size_t{1} << 20;
  CudaDevice::Options options;
  options.kv_memory_bytes = 16 * kMiB;
  options.max_request_bytes = kMiB;
  options.workspace_bytes = kMiB;
  options.list_bytes = kMiB;
  options.superblock_bytes = kMiB / 2;
  options.l2_window = CudaDevice::L2Window::kOn;
  return options;
}

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_DEVICE_FAKE_GPU_H_
