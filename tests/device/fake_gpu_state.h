// The state of the fake GPUs, behind fake_gpu.cc (the CUDA runtime) and fake_gpu_kernels.cc (the
// launchers).
#ifndef FLASHCORE_TESTS_DEVICE_FAKE_GPU_STATE_H_
#define FLASHCORE_TESTS_DEVICE_FAKE_GPU_STATE_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

namespace flashcore::server::testing::fake_gpu {

inline constexpr int kGpus = 2;
inline constexpr size_t kTotalBytes = size_t{8} << 30;
inline constexpr int kL2Bytes = 2 << 20;
inline constexpr int kPersistingMaxBytes = 1 << 20;

struct Stream;
struct Graph;

// Where on a stream the event was last recorded.
struct Event {
  Stream* stream = nullptr;
  uint64_t pieces = 0;           // enqueued before it
  Graph* captured_by = nullptr;  // recorded on a stream that was
};

// Pieces of work, in order. Used by one thread at a time.
struct Stream {
  int gpu = -1;
  cudaAccessPolicyWindow window = {};  // guarded by the mutex of the streams
  std::deque<std::function<void()>> waiting;
  uint64_t done = 0;             // pieces
  Event waited_for;              // the last event of cudaStreamWaitEvent
  Graph* captured_by = nullptr;  // what it is given goes there
  bool reads_window = false;     // the last ReadBytes was of memory that the window covers
};

// Streams that are captured give it what they are given, in that order: pieces, events to record.
struct Graph {
  struct Node {
    std::function<void()> piece;
    Event* event = nullptr;
  };
  std::vector<Node> nodes;
};

// Fails a kind of call after some successes.
class Fault {
 public:
  void Set(cudaError_t error, int successes) {
    std::lock_guard<std::mutex> lock(mutex_);
    error_ = error;
    successes_ = successes;
  }
  // The result of the next call.
  cudaError_t Next() {
    std::lock_guard<std::mutex> lock(mutex_);
    return successes_-- > 0 ? cudaSuccess : error_;
  }

 private:
  std::mutex mutex_;
  cudaError_t error_ = cudaSuccess;
  int successes_ = 0;
};

extern std::atomic<int> resource_calls;
extern std::atomic<int> polls;
extern std::atomic<int> copies;
extern std::atomic<int> graphs;       // uploaded
extern std::atomic<int> launches[2];  // by kernels::Accumulate
extern std::atomic<int> cascade_items;
extern std::atomic<size_t> set_aside_bytes[kGpus];
extern std::atomic<int> l2_resets[kGpus];
extern std::atomic<float> windowed_ms;
extern std::atomic<float> windowed_ms_beside;
extern Fault launch_fault;
extern Fault copy_fault;
extern Fault driver_fault;
extern Fault capture_fault;
extern thread_local int current_gpu;  // -1: not set; the real runtime would use GPU 0

int CurrentGpu();  // fails the test if the thread has not set it

inline Stream* ToStream(void* stream) { return static_cast<Stream*>(stream); }
inline Graph* ToGraph(void* graph) { return static_cast<Graph*>(graph); }
inline Event* ToEvent(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

void EndCapture(const Graph* graph);  // of all its streams

Stream* AddStream();  // on the current GPU
void RemoveStream(Stream* stream);
void SetWindow(Stream* stream, const cudaAccessPolicyWindow& window);

// Whether the stream's window covers [from, from + bytes).
bool WindowCovers(const Stream& stream, const void* from, size_t bytes);

inline uint64_t Enqueued(const Stream& stream) { return stream.done + stream.waiting.size(); }

// Gives the stream a piece of work. It must be of the thread's current GPU.
cudaError_t Push(void* stream, std::function<void()> piece);

// Runs the stream's pieces up to this number; sleeps while its GPU is held. The error of a lost
// GPU.
cudaError_t RunUpTo(Stream* stream, uint64_t pieces);

// As RunUpTo, but without sleeping. False if the GPU is held or lost: nothing has run.
bool TryRunUpTo(Stream* stream, uint64_t pieces);

// The error of a lost GPU, or cudaSuccess.
cudaError_t LossOf(int gpu);

// Device memory belongs to a GPU; pinned memory is for all.
struct Block {
  size_t bytes;
  int gpu;
};
using Memory = std::map<std::byte*, Block>;
extern std::mutex memory_mutex;
extern Memory device_memory;  // guarded by memory_mutex
extern Memory pinned_memory;  // guarded by memory_mutex

cudaError_t Allocate(void** at, size_t bytes, Memory* memory);
cudaError_t Free(void* at, Memory* memory);

// Fail the test if that is not device memory of the current GPU.
void ExpectOnDevice(const void* at, const char* what);
void ExpectOnDevice(const void* at, size_t bytes, const char* what);  // all in one block
// Fails the test if a kernel on the current GPU cannot reach it.
void ExpectInReach(const void* at, const char* what);

}  // namespace flashcore::server::testing::fake_gpu

#endif  // FLASHCORE_TESTS_DEVICE_FAKE_GPU_STATE_H_
