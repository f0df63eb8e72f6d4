// Work on a stream runs when somebody waits for it, as late as a GPU may run it (each poll runs one
// piece), so host memory that is reused too early shows in the results. Kernels must find
// everything they read and write in device memory, which starts as NaN, or in pinned memory.
#include "tests/device/fake_gpu.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/attention_cpu.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/kv_pages.h"
#include "kernels/sm80/attention_sm80.h"
#include "kernels/smxx/read_bytes.h"
#include "kernels/smxx/work_list.h"
#include "kernels/tile_config.h"
#include "tests/device/driver_calls.h"

namespace {

constexpr int kGpus = 2;
constexpr size_t kTotalBytes = size_t{8} << 30;
constexpr int kL2Bytes = 2 << 20;
constexpr int kPersistingMaxBytes = 1 << 20;

struct Stream;

// Where on a stream the event was last recorded.
struct Event {
  Stream* stream = nullptr;
  uint64_t pieces = 0;  // enqueued before it
};

// Pieces of work, in order. Used by one thread at a time.
struct Stream {
  int gpu = -1;
  bool has_window = false;
  std::deque<std::function<void()>> waiting;
  uint64_t done = 0;  // pieces
  Event waited_for;   // the last event of cudaStreamWaitEvent
};

std::atomic<int> resource_calls{0};
std::atomic<int> polls{0};
std::atomic<int> copies{0};
std::atomic<int> waiting_pieces{0};  // of all streams
std::atomic<cudaError_t> launch_error{cudaSuccess};
std::atomic<size_t> window_bytes{0};
std::atomic<size_t> set_aside_bytes[kGpus];
std::atomic<int> l2_resets{0};
std::atomic<float> windowed_ms{0.25f};
std::atomic<float> windowed_ms_beside{0.25f};
std::mutex memory_mutex;
struct Block {
  size_t bytes;
  int gpu;
};
using Memory = std::map<std::byte*, Block>;
Memory device_memory;
Memory pinned_memory;
thread_local int current_gpu = -1;  // not set; the real runtime would use GPU 0

int CurrentGpu() {
  EXPECT_GE(current_gpu, 0);
  return std::max(current_gpu, 0);
}

Stream* ToStream(void* stream) { return static_cast<Stream*>(stream); }
Event* ToEvent(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

uint64_t Enqueued(const Stream& stream) { return stream.done + stream.waiting.size(); }

// `stream` must be of the thread's current GPU.
void Push(void* stream, std::function<void()> piece) {
  EXPECT_EQ(ToStream(stream)->gpu, current_gpu);
  ToStream(stream)->waiting.push_back(std::move(piece));
  ++waiting_pieces;
}

void RunUpTo(Stream* stream, uint64_t pieces) {
  for (; stream->done < pieces; ++stream->done) {
    stream->waiting.front()();
    stream->waiting.pop_front();
    --waiting_pieces;
  }
}

// The block that contains `at`; null if there is none.
const Block* BlockAt(const Memory& memory, const void* at) {
  auto* const address = static_cast<std::byte*>(const_cast<void*>(at));
  const auto after = memory.upper_bound(address);
  if (after == memory.begin()) return nullptr;
  const auto& [begin, block] = *std::prev(after);
  return address < begin + block.bytes ? &block : nullptr;
}

void ExpectOnDevice(const void* at, const char* what) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  const Block* block = BlockAt(device_memory, at);
  ASSERT_NE(block, nullptr) << what;
  EXPECT_EQ(block->gpu, current_gpu) << what;
}

// A kernel can reach device and pinned memory.
void ExpectInReach(const void* at, const char* what) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  const Block* block = BlockAt(device_memory, at);
  EXPECT_TRUE(block != nullptr ? block->gpu == current_gpu : BlockAt(pinned_memory, at) != nullptr)
      << what;
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

}  // namespace

namespace flashcore::server::testing {

int DriverResourceCalls() { return resource_calls; }
int FakeGpuPolls() { return polls; }
int FakeGpuCopies() { return copies; }
int FakeGpuWaitingPieces() { return waiting_pieces; }
void FailFakeGpuLaunches(cudaError_t error) { launch_error = error; }
size_t FakeGpuWindowBytes() { return window_bytes; }
size_t FakeGpuSetAsideBytes() { return set_aside_bytes[0]; }
int FakeGpuL2Resets() { return l2_resets; }
void SetFakeGpuWindowedTimes(float ms, float ms_beside) {
  windowed_ms = ms;
  windowed_ms_beside = ms_beside;
}

}  // namespace flashcore::server::testing

namespace flashcore::kernels {
namespace {

int Enqueue(void* stream, std::function<void()> work) {
  if (launch_error != cudaSuccess) return launch_error;
  Push(stream, std::move(work));
  return cudaSuccess;
}

void ExpectSpanInReach(const Span& span) {
  ExpectInReach(span.query, "query");
  ExpectInReach(span.output, "output");
  if (span.lse != nullptr) ExpectInReach(span.lse, "lse");
  if (span.kv.rows == 0) return;
  ExpectInReach(span.kv.key, "key");
  ExpectInReach(span.kv.value, "value");
  if (span.kv.pages == nullptr) return;
  ExpectOnDevice(span.kv.key, "resident key");
  ExpectInReach(span.kv.pages, "pages");
}

// The counters of finished splits are in device memory, and 0.
void ExpectCounters(const int32_t* finished, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    ExpectOnDevice(finished + i, "counters");
    EXPECT_EQ(finished[i], 0);
  }
}

// The kernel reads the work list, not the batch, so the list must be that of `batch`.
void ExpectWorkListOf(const AttentionBatch& batch, const Plan& plan, void* work_list) {
  ExpectInReach(work_list, "work list");
  std::vector<std::byte> should(WorkListBytes(plan) + kWorkListAlignment);
  void* aligned = should.data();
  size_t room = should.size();
  std::align(kWorkListAlignment, WorkListBytes(plan), aligned, room);
  PackWorkList(batch, plan, static_cast<std::byte*>(aligned));
  const WorkListView want(batch, plan, aligned), has(batch, plan, work_list);
  for (int kind = 0; kind < kCudaTileKinds; ++kind) {
    for (int32_t i = 0; i < want.kinds[kind].count; ++i) {
      const WorkTile &w = want.kinds[kind].tiles[i], &h = has.kinds[kind].tiles[i];
      EXPECT_EQ(h.query, w.query);
      EXPECT_EQ(h.pages, w.pages);
      EXPECT_EQ(h.row_count, w.row_count);
      EXPECT_EQ(h.kv_end, w.kv_end);
    }
  }
}

}  // namespace

int LaunchAttentionSm80(const AttentionBatch& batch, const Plan& plan, const LaunchContext& ctx) {
  std::vector<Span> spans(batch.spans, batch.spans + batch.num_spans);
  return Enqueue(ctx.stream, [spans = std::move(spans), geometry = batch.geometry, plan, ctx] {
    const AttentionBatch copy = {geometry, spans.data(), static_cast<int32_t>(spans.size())};
    for (const Span& span : spans) ExpectSpanInReach(span);
    ExpectWorkListOf(copy, plan, ctx.work_list);
    const WorkListView work(copy, plan, ctx.work_list);
    ExpectCounters(work.finished, plan.combines.size());
    thread_local ThreadPool threads(1);
    PlanOptions apart = Sm80Plan(geometry.head_dim);
    apart.item_per_kv_head = true;  // as CPU kernels need it
    Plan cpu_plan;
    MakePlan(copy, apart, 1, &cpu_plan);
    LaunchAttentionCpu(copy, cpu_plan, {ctx.workspace, &threads});
  });
}

int LaunchAttentionSm80Float16(const AttentionBatch&, const Plan&, const LaunchContext&) {
  return cudaErrorNotSupported;
}

int AppendRowsCuda(const PageLayout& layout, const RowAppend* appends, int32_t count,
                   void* stream) {
  return Enqueue(stream, [=] {
    ExpectInReach(appends, "appends");
    for (int32_t i = 0; i < count; ++i) {
      ExpectInReach(appends[i].key, "key to append");
      ExpectInReach(appends[i].value, "value to append");
      ExpectOnDevice(appends[i].page, "page");
    }
    AppendRowsCpu(layout, appends, count, nullptr);
  });
}

int CopyPagesCuda(int64_t page_bytes, const PageCopy* copies, int32_t count, void* stream) {
  return Enqueue(stream, [=] {
    ExpectInReach(copies, "copies");
    CopyPagesCpu(page_bytes, copies, count, nullptr);
  });
}

cudaError_t ReadBytes(const void* from, size_t bytes, uint32_t* sink, cudaStream_t stream) {
  return static_cast<cudaError_t>(Enqueue(stream, [=] {
    const auto* const bytes_read = static_cast<const std::byte*>(from);
    ExpectOnDevice(bytes_read, "the first byte to read");
    ExpectOnDevice(bytes_read + bytes - 1, "the last byte to read");
    ExpectOnDevice(sink, "sink");
  }));
}

}  // namespace flashcore::kernels

// The functions of the CUDA runtime that the server uses.

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kGpus;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int gpu) {
  current_gpu = gpu;
  return gpu >= 0 && gpu < kGpus ? cudaSuccess : cudaErrorInvalidDevice;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "Fake");
  properties->major = 8;
  properties->minor = 9;
  properties->totalGlobalMem = kTotalBytes;
  properties->multiProcessorCount = 4;
  properties->l2CacheSize = kL2Bytes;
  properties->persistingL2CacheMaxSize = kPersistingMaxBytes;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = kPersistingMaxBytes;
  return cudaSuccess;
}
cudaError_t cudaDeviceSetLimit(cudaLimit, size_t bytes) {
  set_aside_bytes[CurrentGpu()] = bytes;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetLimit(size_t* bytes, cudaLimit) {
  *bytes = set_aside_bytes[CurrentGpu()];
  return cudaSuccess;
}
cudaError_t cudaCtxResetPersistingL2Cache() {
  ++l2_resets;
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t) { return "a name"; }
const char* cudaGetErrorString(cudaError_t) { return "a fake error"; }

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = *total_bytes = kTotalBytes;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  const cudaError_t error = Allocate(memory, bytes, &device_memory);
  if (error == cudaSuccess && bytes <= size_t{32} << 20) std::memset(*memory, 0xff, bytes);
  return error;
}
cudaError_t cudaFree(void* memory) { return Free(memory, &device_memory); }
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags) {
  EXPECT_GE(current_gpu, 0);
  EXPECT_NE(flags & cudaHostAllocPortable, 0u);  // for all GPUs and threads
  return Allocate(memory, bytes, &pinned_memory);
}
cudaError_t cudaFreeHost(void* memory) {
  EXPECT_GE(current_gpu, 0);
  return Free(memory, &pinned_memory);
}
cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned flags) {
  EXPECT_GE(current_gpu, 0);
  EXPECT_NE(flags & cudaHostRegisterPortable, 0u);  // for all GPUs
  std::lock_guard<std::mutex> lock(memory_mutex);
  const bool is_new =
      pinned_memory.emplace(static_cast<std::byte*>(memory), Block{bytes, current_gpu}).second;
  return is_new ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered;
}
cudaError_t cudaHostUnregister(void* memory) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  return pinned_memory.erase(static_cast<std::byte*>(memory)) == 1
             ? cudaSuccess
             : cudaErrorHostMemoryNotRegistered;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  ++resource_calls;
  auto* const made = new Stream;
  made->gpu = current_gpu;
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  ++resource_calls;
  waiting_pieces -= static_cast<int>(ToStream(stream)->waiting.size());
  delete ToStream(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream != nullptr) RunUpTo(ToStream(stream), Enqueued(*ToStream(stream)));
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const Event until = *ToEvent(event);
  ToStream(stream)->waited_for = until;
  Push(stream, [until] { RunUpTo(until.stream, until.pieces); });
  return cudaSuccess;
}
cudaError_t cudaStreamSetAttribute(cudaStream_t stream, cudaStreamAttrID,
                                   const cudaStreamAttrValue* set) {
  window_bytes = set->accessPolicyWindow.num_bytes;
  ToStream(stream)->has_window = true;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  ++resource_calls;
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  ++resource_calls;
  delete ToEvent(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *ToEvent(event) = {ToStream(stream), Enqueued(*ToStream(stream))};
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  RunUpTo(ToEvent(event)->stream, ToEvent(event)->pieces);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  Stream* const stream = ToEvent(event)->stream;
  if (stream == nullptr || stream->done >= ToEvent(event)->pieces) return cudaSuccess;
  RunUpTo(stream, stream->done + 1);
  ++polls;
  return cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t end) {
  const Stream* const stream = ToEvent(end)->stream;
  const Event& before = stream->waited_for;
  const bool beside = before.stream != nullptr && Enqueued(*before.stream) > before.pieces;
  *ms = 0.25f;
  if (stream->has_window) *ms = beside ? windowed_ms_beside.load() : windowed_ms.load();
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  ++copies;
  ExpectOnDevice(kind == cudaMemcpyHostToDevice ? to : from, "a copy's end on the device");
  Push(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
