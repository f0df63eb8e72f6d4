#include <errno.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

#include "tests/bench/background_reader.h"
#include "tests/bench/kernels/device_kernels.h"
#include "tests/bench/l2_summary.h"

namespace flashcore::kernels {
namespace {

using Count = unsigned long long;  // as atomicAdd takes it

// In device memory.
struct State {
  struct Mark {
    Count bytes;
    Count ns;
  };
  Count bytes;  // read since the start
  Mark marks[2];
  uint32_t sink;               // never written in practice
  alignas(128) uint32_t stop;  // not 0: the blocks end
};

constexpr size_t kMemoryBytes = size_t{1} << 30;
constexpr int kThreads = 32;
constexpr int kThreadWords = 8;  // of 16 bytes, all in flight at once
constexpr size_t kChunkWords = size_t{kThreads} * kThreadWords;
constexpr size_t kChunkBytes = kChunkWords * sizeof(uint4);
constexpr size_t kChunks = kMemoryBytes / kChunkBytes;

// Between two looks at the stop flag, which are also when a block counts its bytes: about 10 us.
constexpr int kStepChunks = 16;
// Bounds a run. A chunk takes at least 0.25 us: no DRAM answers faster.
constexpr int kMaxSteps = 1 << 17;

// Several times what should reach the DRAM's rate on an H100.
constexpr int kMostBlocksPerSm = 16;
constexpr uint64_t kAloneDelayNs = 500'000;
constexpr uint64_t kAloneNs = 3'000'000;
constexpr int kWarmUpRuns = 10;
constexpr int kLoadTries = 3;

// A sum that memory almost never has. Without the comparison the compiler would drop the reads.
constexpr uint32_t kUnlikely = 0x9e3779b9;

__global__ void __launch_bounds__(kThreads) ReadKernel(const uint4* words, State* state) {
  size_t chunk = blockIdx.x;
  for (int step = 0; step < kMaxSteps; ++step) {
    if (*const_cast<const volatile uint32_t*>(&state->stop) != 0) return;
    uint32_t sum = 0;
#pragma unroll 1
    for (int i = 0; i < kStepChunks; ++i) {
      const uint4* const from = words + chunk * kChunkWords + threadIdx.x;
      uint4 read[kThreadWords];
#pragma unroll
      for (int w = 0; w < kThreadWords; ++w) read[w] = __ldcg(from + w * kThreads);
#pragma unroll
      for (const uint4& word : read) sum += word.x + word.y + word.z + word.w;
      chunk += gridDim.x;
      if (chunk >= kChunks) chunk -= kChunks;
    }
    if (sum == kUnlikely) state->sink = sum;
    if (threadIdx.x == 0) atomicAdd(&state->bytes, Count{kStepChunks * kChunkBytes});
  }
}

__device__ uint64_t Nanoseconds() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void MarkKernel(int which, uint64_t delay_ns, State* state) {
  for (const uint64_t begin = Nanoseconds(); Nanoseconds() - begin < delay_ns;) __nanosleep(1000);
  state->marks[which] = {atomicAdd(&state->bytes, Count{0}), Nanoseconds()};
}

int Multiprocessors() {
  int device = 0, count = 0;
  Check(cudaGetDevice(&device), "find the device");
  Check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
        "count the multiprocessors");
  return count;
}

State* StateOf(const DeviceMemory& memory) { return static_cast<State*>(memory.get()); }

}  // namespace

void Fail(const char* why) {
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, why);
  std::exit(1);
}

BackgroundReader::BackgroundReader() {
  for (CudaStream* stream : {&stream_, &control_}) {
    Check(cudaStreamCreateWithFlags(stream->out(), cudaStreamNonBlocking), "create a stream");
  }
  Check(cudaMalloc(memory_.out(), kMemoryBytes), "allocate 1 GiB for background reads");
  Check(cudaMalloc(state_.out(), sizeof(State)), "allocate the state of background reads");
  Check(FillUniform(DType::kFloat16, 1, kMemoryBytes / sizeof(uint16_t), memory_.get(),
                    stream_.get()),
        "fill the memory of background reads");
  // A multiprocessor cannot change its split into L1 and shared memory while a block runs on it.
  // With the most shared memory an attention kernel can join the reader there.
  Check(cudaFuncSetAttribute(ReadKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "prefer shared memory");
  // Loads what a run launches: the driver may have to wait for the reader to load code.
  Check(cudaMemsetAsync(state_.get(), 1, sizeof(State), stream_.get()), "set the stop flag");
  ReadKernel<<<1, kThreads, 0, stream_.get()>>>(static_cast<const uint4*>(memory_.get()),
                                                StateOf(state_));
  Mark(0, stream_.get());
  Check(cudaStreamSynchronize(stream_.get()), "run the background reader");

  const int most_blocks = kMostBlocksPerSm * Multiprocessors();
  for (int run = 0; run < kWarmUpRuns; ++run) MeasureAlone(most_blocks);  // wakes the clocks up
  for (int blocks = most_blocks; blocks > 0; blocks /= 2) {
    gbps_of_blocks_[blocks] = MeasureAlone(blocks);
  }
}

double BackgroundReader::full_gbps() const {
  double full = 0;
  for (const auto& [blocks, gbps] : gbps_of_blocks_) full = std::max(full, gbps);
  return full;
}

BackgroundLoad BackgroundReader::LoadFor(double share) {
  BackgroundLoad load = {share, 0, 0};
  if (share == 0) return load;
  const double gbps = share * full_gbps();
  for (int n = 0; n < kLoadTries; ++n) {  // each try adds a point to the curve, near the goal
    load.blocks = BlocksForRate(gbps_of_blocks_, gbps);
    load.alone_gbps = gbps_of_blocks_[load.blocks] = MeasureAlone(load.blocks);
  }
  return load;
}

void BackgroundReader::Start(int blocks) {
  Check(cudaMemsetAsync(state_.get(), 0, sizeof(State), stream_.get()), "reset the stop flag");
  ReadKernel<<<blocks, kThreads, 0, stream_.get()>>>(static_cast<const uint4*>(memory_.get()),
                                                     StateOf(state_));
  Check(cudaGetLastError(), "launch the background reader");
}

void BackgroundReader::Mark(int which, cudaStream_t stream, uint64_t delay_ns) {
  MarkKernel<<<1, 1, 0, stream>>>(which, delay_ns, StateOf(state_));
  Check(cudaGetLastError(), "launch a mark");
}

double BackgroundReader::Stop() {
  const bool runs = cudaStreamQuery(stream_.get()) == cudaErrorNotReady;
  (void)cudaGetLastError();  // "not ready" is left there
  Check(cudaMemsetAsync(&StateOf(state_)->stop, 1, sizeof(uint32_t), control_.get()),
        "set the stop flag");
  Check(cudaStreamSynchronize(control_.get()), "set the stop flag");
  Check(cudaStreamSynchronize(stream_.get()), "run the background reader");
  State state;
  Check(cudaMemcpy(&state, state_.get(), sizeof state, cudaMemcpyDeviceToHost), "read the marks");
  const State::Mark &first = state.marks[0], &last = state.marks[1];
  if (!runs || first.bytes == 0 || last.ns <= first.ns) return 0;
  return static_cast<double>(last.bytes - first.bytes) / static_cast<double>(last.ns - first.ns);
}

double BackgroundReader::MeasureAlone(int blocks) {
  Start(blocks);
  Mark(0, control_.get(), kAloneDelayNs);
  Mark(1, control_.get(), kAloneNs);
  Check(cudaStreamSynchronize(control_.get()), "time background reads");
  const double gbps = Stop();
  if (gbps == 0) Fail("the background reader ended too early");
  return gbps;
}

}  // namespace flashcore::kernels
