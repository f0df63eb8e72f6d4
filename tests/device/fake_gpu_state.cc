#include "tests/device/fake_gpu_state.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <iterator>
#include <set>
#include <utility>

#include "gtest/gtest.h"
#include "tests/device/driver_calls.h"
#include "tests/device/fake_gpu.h"

namespace flashcore::server::testing {
namespace fake_gpu {

std::atomic<int> resource_calls{0};
std::atomic<int> polls{0};
std::atomic<int> copies{0};
std::atomic<int> graphs{0};
std::atomic<int> launches[2];
std::atomic<int> cascade_items{0};
std::atomic<size_t> set_aside_bytes[kGpus];
std::atomic<int> l2_resets[kGpus];
std::atomic<float> windowed_ms{kFakeGpuPieceMs};
std::atomic<float> windowed_ms_beside{kFakeGpuPieceMs};
Fault launch_fault;
Fault copy_fault;
Fault driver_fault;
Fault capture_fault;
std::mutex memory_mutex;
Memory device_memory;
Memory pinned_memory;
thread_local int current_gpu = -1;

namespace {

std::mutex streams_mutex;
std::set<Stream*> streams;  // guarded by streams_mutex

std::atomic<int> waiting_pieces[kGpus];

std::mutex gpus_mutex;
std::condition_variable gpus_changed;
struct Gpu {
  bool held = false;
  cudaError_t loss = cudaSuccess;
};
Gpu gpus[kGpus];  // guarded by gpus_mutex, and so is:
int waiters = 0;

void DropWaiting(Stream* stream) {
  waiting_pieces[stream->gpu] -= static_cast<int>(stream->waiting.size());
  stream->done += stream->waiting.size();
  stream->waiting.clear();
}

void Run(Stream* stream, uint64_t pieces) {
  for (; stream->done < pieces; ++stream->done) {
    stream->waiting.front()();
    stream->waiting.pop_front();
    --waiting_pieces[stream->gpu];
  }
}

// The block that contains `at`, and its bytes from there on; null if there is none.
std::pair<const Block*, size_t> BlockAt(const Memory& memory, const void* at) {
  auto* const address = static_cast<std::byte*>(const_cast<void*>(at));
  const auto after = memory.upper_bound(address);
  if (after == memory.begin()) return {nullptr, 0};
  const auto& [begin, block] = *std::prev(after);
  if (address >= begin + block.bytes) return {nullptr, 0};
  return {&block, static_cast<size_t>(begin + block.bytes - address)};
}

}  // namespace

int CurrentGpu() {
  EXPECT_GE(current_gpu, 0);
  return std::max(current_gpu, 0);
}

void EndCapture(const Graph* graph) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  for (Stream* stream : streams) {
    if (stream->captured_by == graph) stream->captured_by = nullptr;
  }
}

Stream* AddStream() {
  auto* const stream = new Stream;
  stream->gpu = CurrentGpu();
  std::lock_guard<std::mutex> lock(streams_mutex);
  streams.insert(stream);
  return stream;
}

void RemoveStream(Stream* stream) {
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    streams.erase(stream);
  }
  DropWaiting(stream);
  delete stream;
}

void SetWindow(Stream* stream, const cudaAccessPolicyWindow& window) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  stream->window = window;
}

bool WindowCovers(const Stream& stream, const void* from, size_t bytes) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  const auto* const base = static_cast<const std::byte*>(stream.window.base_ptr);
  const auto* const begin = static_cast<const std::byte*>(from);
  return base != nullptr && base <= begin && begin + bytes <= base + stream.window.num_bytes;
}

cudaError_t Push(void* stream, std::function<void()> piece) {
  Stream* const to = ToStream(stream);
  EXPECT_EQ(to->gpu, current_gpu);
  if (const cudaError_t loss = LossOf(to->gpu); loss != cudaSuccess) return loss;
  if (to->captured_by != nullptr) {
    to->captured_by->nodes.push_back({std::move(piece), nullptr});
    return cudaSuccess;
  }
  to->waiting.push_back(std::move(piece));
  ++waiting_pieces[to->gpu];
  return cudaSuccess;
}

cudaError_t RunUpTo(Stream* stream, uint64_t pieces) {
  cudaError_t loss = cudaSuccess;
  {
    std::unique_lock<std::mutex> lock(gpus_mutex);
    const Gpu& gpu = gpus[stream->gpu];
    while (gpu.held && gpu.loss == cudaSuccess) {
      ++waiters;
      gpus_changed.wait(lock);
      --waiters;
    }
    loss = gpu.loss;
  }
  if (loss == cudaSuccess) {
    Run(stream, pieces);
  } else {
    DropWaiting(stream);
  }
  return loss;
}

bool TryRunUpTo(Stream* stream, uint64_t pieces) {
  {
    std::lock_guard<std::mutex> lock(gpus_mutex);
    const Gpu& gpu = gpus[stream->gpu];
    if (gpu.held || gpu.loss != cudaSuccess) return false;
  }
  Run(stream, pieces);
  return true;
}

cudaError_t LossOf(int gpu) {
  std::lock_guard<std::mutex> lock(gpus_mutex);
  return gpus[gpu].loss;
}

cudaError_t Allocate(void** at, size_t bytes, Memory* memory) {
  ++resource_calls;
  if (bytes > kTotalBytes) return cudaErrorMemoryAllocation;
  *at = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*at == nullptr) return cudaErrorMemoryAllocation;
  std::lock_guard<std::mutex> lock(memory_mutex);
  (*memory)[static_cast<std::byte*>(*at)] = {bytes, current_gpu};
  return cudaSuccess;
}

cudaError_t Free(void* at, Memory* memory) {
  ++resource_calls;
  std::lock_guard<std::mutex> lock(memory_mutex);
  memory->erase(static_cast<std::byte*>(at));
  std::free(at);
  return cudaSuccess;
}

void ExpectOnDevice(const void* at, const char* what) { ExpectOnDevice(at, 1, what); }

void ExpectOnDevice(const void* at, size_t bytes, const char* what) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  const auto [block, rest] = BlockAt(device_memory, at);
  ASSERT_NE(block, nullptr) << what;
  EXPECT_EQ(block->gpu, current_gpu) << what;
  EXPECT_LE(bytes, rest) << what;
}

void ExpectInReach(const void* at, const char* what) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  const Block* const block = BlockAt(device_memory, at).first;
  EXPECT_TRUE(block != nullptr ? block->gpu == current_gpu
                               : BlockAt(pinned_memory, at).first != nullptr)
      << what;
}

}  // namespace fake_gpu

int DriverResourceCalls() { return fake_gpu::resource_calls; }
int FakeGpuPolls() { return fake_gpu::polls; }
int FakeGpuCopies() { return fake_gpu::copies; }
int FakeGpuGraphs() { return fake_gpu::graphs; }
int FakeGpuLaunches(kernels::Accumulate accumulate) {
  return fake_gpu::launches[static_cast<size_t>(accumulate)];
}

int FakeGpuCascadeItems() { return fake_gpu::cascade_items; }
int FakeGpuWaitingPieces(int gpu) { return fake_gpu::waiting_pieces[gpu]; }
int FakeGpuWaiters() {
  std::lock_guard<std::mutex> lock(fake_gpu::gpus_mutex);
  return fake_gpu::waiters;
}
size_t FakeGpuSetAsideBytes(int gpu) { return fake_gpu::set_aside_bytes[gpu]; }
int FakeGpuL2Resets(int gpu) { return fake_gpu::l2_resets[gpu]; }
std::vector<cudaAccessPolicyWindow> FakeGpuWindows(int gpu) {
  std::lock_guard<std::mutex> lock(fake_gpu::streams_mutex);
  std::vector<cudaAccessPolicyWindow> windows;
  for (const fake_gpu::Stream* stream : fake_gpu::streams) {
    if (stream->gpu == gpu) windows.push_back(stream->window);
  }
  return windows;
}

void SetFakeGpuWindowedTimes(float ms, float ms_beside) {
  fake_gpu::windowed_ms = ms;
  fake_gpu::windowed_ms_beside = ms_beside;
}
void FailFakeGpuLaunches(cudaError_t error, int successes) {
  fake_gpu::launch_fault.Set(error, successes);
}
void FailFakeGpuCopies(cudaError_t error, int successes) {
  fake_gpu::copy_fault.Set(error, successes);
}
void FailFakeGpuCaptures(bool fail, int successes) {
  fake_gpu::capture_fault.Set(fail ? cudaErrorUnknown : cudaSuccess, successes);
}
void FailFakeGpuDriver(bool fail, int successes) {
  fake_gpu::driver_fault.Set(fail ? cudaErrorUnknown : cudaSuccess, successes);
}
void HoldFakeGpu(int gpu, bool held) {
  std::lock_guard<std::mutex> lock(fake_gpu::gpus_mutex);
  fake_gpu::gpus[gpu].held = held;
  fake_gpu::gpus_changed.notify_all();
}
void LoseFakeGpu(int gpu, cudaError_t error) {
  std::lock_guard<std::mutex> lock(fake_gpu::gpus_mutex);
  fake_gpu::gpus[gpu].loss = error;
  fake_gpu::gpus_changed.notify_all();
}
void RestoreFakeGpus() {
  FailFakeGpuLaunches(cudaSuccess);
  FailFakeGpuCopies(cudaSuccess);
  FailFakeGpuDriver(false);
  FailFakeGpuCaptures(false);
  SetFakeGpuWindowedTimes(kFakeGpuPieceMs, kFakeGpuPieceMs);
  for (int gpu = 0; gpu < fake_gpu::kGpus; ++gpu) {
    LoseFakeGpu(gpu, cudaSuccess);
    HoldFakeGpu(gpu, false);
  }
}

}  // namespace flashcore::server::testing
