// Two fake GPUs made of host memory. A program that links flashcore_fake_gpu in place of the CUDA
// runtime and the CUDA kernels runs the rest of the CUDA device without a GPU. Thread-safe.
#ifndef FLASHCORE_TESTS_DEVICE_FAKE_GPU_H_
#define FLASHCORE_TESTS_DEVICE_FAKE_GPU_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "kernels/kernel.h"
#include "server/device/cuda_device.h"

namespace flashcore::server::testing {

// ---- What GPUs have been asked so far.

// Queries of an event that was not done yet.
int FakeGpuPolls();

// Copies between host and device memory that streams have been given.
int FakeGpuCopies();
int FakeGpuGraphs();  // that were uploaded: launches that were staged

// Launches of attention kernels with these sums.
int FakeGpuLaunches(kernels::Accumulate accumulate);

// Work items of these that read K/V for several spans.
int FakeGpuCascadeItems();

// Copies and kernels that the streams of `gpu` have been given and have not run yet.
int FakeGpuWaitingPieces(int gpu);

// Threads that sleep until a stream or an event is done.
int FakeGpuWaiters();

// Allocations, reserved addresses and maps of memory for clients that exist.
int FakeGpuSharedResources();

// Bytes of the L2 that are set aside, and the resets of its persisting lines.
size_t FakeGpuSetAsideBytes(int gpu);
int FakeGpuL2Resets(int gpu);

// The access-policy window of each stream of `gpu` that exists; of 0 bytes if none was set.
std::vector<cudaAccessPolicyWindow> FakeGpuWindows(int gpu);

// ---- What they do from now on.

// The time of every copy and kernel, by the events around it.
inline constexpr float kFakeGpuPieceMs = 0.25f;

// The time of reading memory that the stream's window covers; initially as without a window.
// `ms_beside` applies if the stream waited for another one, and that one has been given more work
// since.
void SetFakeGpuWindowedTimes(float ms, float ms_beside);

// Kernel launches, or copies between host and device memory, return `error` after the next
// `successes` calls. cudaSuccess: they no longer fail.
void FailFakeGpuLaunches(cudaError_t error, int successes = 0);
void FailFakeGpuCopies(cudaError_t error, int successes = 0);

// Functions of the CUDA driver (cuda_driver.h) fail after the next `successes` calls.
void FailFakeGpuDriver(bool fail, int successes = 0);
// The same of the calls that capture a stream and make its graph.
void FailFakeGpuCaptures(bool fail, int successes = 0);

// While a GPU is held, no piece of work runs on it. Whoever waits for one, waits.
void HoldFakeGpu(int gpu, bool held);

// The GPU drops its waiting pieces of work, and calls that use it return `error`.
void LoseFakeGpu(int gpu, cudaError_t error);

// Ends all of the above.
void RestoreFakeGpus();

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
