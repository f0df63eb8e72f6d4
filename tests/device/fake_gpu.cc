// The functions of the CUDA runtime that the server uses, on two fake GPUs. Work on a stream runs
// when somebody waits for it, as late as a GPU may run it (each poll runs one piece), so host
// memory that is reused too early shows in the results. Device memory starts as NaN.
#include "tests/device/fake_gpu.h"

#include <cstring>

#include "gtest/gtest.h"
#include "tests/device/fake_gpu_state.h"

// C functions are the same in every namespace.
namespace flashcore::server::testing::fake_gpu {
namespace {

// Whether that begins in a block of pinned memory and ends outside, which CUDA refuses.
bool LeavesItsBlock(const void* at, size_t bytes) {
  auto* const begin = static_cast<std::byte*>(const_cast<void*>(at));
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto after = pinned_memory.upper_bound(begin);
  if (after == pinned_memory.begin()) return false;
  const auto& [start, block] = *--after;
  return begin < start + block.bytes && begin + bytes > start + block.bytes;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kGpus;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int gpu) {
  current_gpu = gpu;
  return gpu >= 0 && gpu < kGpus ? cudaSuccess : cudaErrorInvalidDevice;
}
cudaError_t cudaGetDevice(int* gpu) {
  *gpu = CurrentGpu();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int gpu) {
  *properties = {};
  std::strcpy(properties->name, "Fake");
  std::strcpy(properties->uuid.bytes, "fake GPU 0");
  properties->uuid.bytes[9] = static_cast<char>('0' + gpu);
  properties->major = 8;
  properties->minor = 9;
  properties->totalGlobalMem = kTotalBytes;
  properties->multiProcessorCount = 4;
  properties->sharedMemPerBlockOptin = 99 << 10;
  properties->l2CacheSize = kL2Bytes;
  properties->persistingL2CacheMaxSize = kPersistingMaxBytes;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrClockRate:
      *value = 2'000'000;  // kHz
      break;
    case cudaDevAttrMemoryClockRate:
      *value = 6'000'000;
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = 192;
      break;
    default:
      *value = kPersistingMaxBytes;
  }
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
  ++l2_resets[CurrentGpu()];
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
  *stream = reinterpret_cast<cudaStream_t>(AddStream());
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  ++resource_calls;
  RemoveStream(ToStream(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream == nullptr) return cudaSuccess;
  return RunUpTo(ToStream(stream), Enqueued(*ToStream(stream)));
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const Event until = *ToEvent(event);
  if (until.captured_by != nullptr) {  // the stream joins the capture
    ToStream(stream)->captured_by = until.captured_by;
    return cudaSuccess;
  }
  ToStream(stream)->waited_for = until;
  return Push(stream, [until] { RunUpTo(until.stream, until.pieces); });
}
cudaError_t cudaStreamSetAttribute(cudaStream_t stream, cudaStreamAttrID attribute,
                                   const cudaStreamAttrValue* set) {
  EXPECT_EQ(attribute, cudaStreamAttributeAccessPolicyWindow);
  const cudaAccessPolicyWindow& window = set->accessPolicyWindow;
  EXPECT_EQ(ToStream(stream)->gpu, current_gpu);
  EXPECT_GT(window.num_bytes, 0u);
  EXPECT_LE(window.num_bytes, size_t{kPersistingMaxBytes});
  ExpectOnDevice(window.base_ptr, window.num_bytes, "the access-policy window");
  SetWindow(ToStream(stream), window);
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
  *ToEvent(event) = {ToStream(stream), Enqueued(*ToStream(stream)), ToStream(stream)->captured_by};
  return LossOf(ToStream(stream)->gpu);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  Graph* const graph = ToStream(stream)->captured_by;
  EXPECT_EQ(graph != nullptr, flags == cudaEventRecordExternal);
  if (graph == nullptr) return cudaEventRecord(event, stream);
  graph->nodes.push_back({nullptr, ToEvent(event)});
  return LossOf(ToStream(stream)->gpu);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  Stream* const stream = ToEvent(event)->stream;
  if (stream == nullptr) return cudaSuccess;
  if (const cudaError_t loss = LossOf(stream->gpu); loss != cudaSuccess) return loss;
  if (stream->done >= ToEvent(event)->pieces) return cudaSuccess;
  TryRunUpTo(stream, stream->done + 1);
  ++polls;
  return cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  const Stream* const stream = ToEvent(end)->stream;
  EXPECT_EQ(ToEvent(begin)->stream, stream);
  const auto pieces = static_cast<float>(ToEvent(end)->pieces - ToEvent(begin)->pieces);
  const Event& before = stream->waited_for;
  const bool beside = before.stream != nullptr && Enqueued(*before.stream) > before.pieces;
  *ms = pieces * kFakeGpuPieceMs;
  if (stream->reads_window) *ms = pieces * (beside ? windowed_ms_beside : windowed_ms);
  return LossOf(stream->gpu);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (const cudaError_t error = capture_fault.Next(); error != cudaSuccess) return error;
  EXPECT_EQ(ToStream(stream)->captured_by, nullptr);
  ToStream(stream)->captured_by = new Graph;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Graph* const captured = ToStream(stream)->captured_by;
  EndCapture(captured);
  *graph = reinterpret_cast<cudaGraph_t>(captured);
  return capture_fault.Next();
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  if (const cudaError_t error = capture_fault.Next(); error != cudaSuccess) return error;
  *exec = reinterpret_cast<cudaGraphExec_t>(new Graph(*ToGraph(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph,
                                cudaGraphExecUpdateResultInfo*) {
  if (ToGraph(exec)->nodes.size() != ToGraph(graph)->nodes.size()) {
    return cudaErrorGraphExecUpdateFailure;
  }
  *ToGraph(exec) = *ToGraph(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
  ++graphs;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  if (const cudaError_t error = launch_fault.Next(); error != cudaSuccess) return error;
  for (const Graph::Node& node : ToGraph(exec)->nodes) {
    const cudaError_t error =
        node.event == nullptr ? Push(stream, node.piece)
                              : cudaEventRecord(reinterpret_cast<cudaEvent_t>(node.event), stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete ToGraph(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete ToGraph(exec);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  ExpectOnDevice(memory, bytes, "memory to set");
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (const cudaError_t error = copy_fault.Next(); error != cudaSuccess) return error;
  ++copies;
  const void* const on_device = kind == cudaMemcpyHostToDevice ? to : from;
  if (LeavesItsBlock(on_device == to ? from : to, bytes)) return cudaErrorInvalidValue;
  ExpectOnDevice(on_device, bytes, "a copy's end on the device");
  return Push(stream, [=] { std::memcpy(to, from, bytes); });
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  if (const cudaError_t error = copy_fault.Next(); error != cudaSuccess) return error;
  ++copies;
  const bool in = kind == cudaMemcpyHostToDevice;
  const size_t bytes = (height - 1) * (in ? to_pitch : from_pitch) + width;
  ExpectOnDevice(in ? to : from, bytes, "a copy's end on the device");
  return Push(stream, [=] {
    for (size_t row = 0; row < height; ++row) {
      std::memcpy(static_cast<std::byte*>(to) + row * to_pitch,
                  static_cast<const std::byte*>(from) + row * from_pitch, width);
    }
  });
}

}  // extern "C"
}  // namespace flashcore::server::testing::fake_gpu
