// Two fake GPUs made of host memory. A program that links fake_gpu.cc in place of the CUDA runtime
// and the CUDA kernels runs the rest of the CUDA device without a GPU.
#ifndef FLASHCORE_TESTS_DEVICE_FAKE_GPU_H_
#define FLASHCORE_TESTS_DEVICE_FAKE_GPU_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "server/device/cuda_device.h"

namespace flashcore::server::testing {

// Queries so far of an event that was not done yet.
int FakeGpuPolls();

// Copies so far between host and device memory that streams have been given.
int FakeGpuCopies();

// Copies and kernels that streams have been given and have not run yet.
int FakeGpuWaitingPieces();

// Every later kernel launch returns `error`, until told cudaSuccess.
void FailFakeGpuLaunches(cudaError_t error);

// Bytes of the access-policy window that was set last, on any stream.
size_t FakeGpuWindowBytes();

// Bytes of GPU 0's L2 that are set aside, and the resets of persisting lines so far.
size_t FakeGpuSetAsideBytes();
int FakeGpuL2Resets();

// The time between two events on a stream that has a window, from now on; initially 0.25 ms, as
// without a window. `ms_beside` applies if the stream waited for another one, and that one has been
// given more work since.
void SetFakeGpuWindowedTimes(float ms, float ms_beside);

// Options of a device with 16 MiB of K/V memory and lanes for requests of 1 MiB.
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
