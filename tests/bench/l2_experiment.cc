#include "tests/bench/l2_experiment.h"

#include <cuda_profiler_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "kernels/bench/accuracy.h"
#include "kernels/bench/bench_options.h"
#include "kernels/bench/device_kernels.h"

namespace flashcore::kernels {
namespace {

constexpr int kColdSets = 8;  // 512 MiB, many times any L2

// Cold launches before a batch, about 0.3 ms of an H200: while they run the host enqueues the
// batch, so that no wait for it is timed.
constexpr int kLeadLaunches = 16;

// Cold launches for each hot one where they never pause: they take longer than it does.
constexpr int kEndlessLaunches = 2;

AttentionShape Decode(int sequences) {
  AttentionShape shape;
  shape.paged = true;
  shape.spans = sequences;
  shape.num_heads = 32;
  shape.num_kv_heads = 8;
  shape.query_rows = 1;
  shape.kv_rows = 4096;
  shape.head_dim = 128;
  return shape;
}

AttentionShape ColdDecode() {
  return Decode(L2Experiment::kColdLaunchBytes / L2Experiment::kSequenceBytes);
}

[[noreturn]] void Fail(const char* why) {
  std::fprintf(stderr, "flashcore-l2-window-bench: %s\n", why);
  std::exit(1);
}

CudaStream MakeStream() {
  CudaStream stream;
  Check(cudaStreamCreateWithFlags(stream.out(), cudaStreamNonBlocking), "create a stream");
  return stream;
}

const Kernel& DecodeKernel() {
  const KernelSpec spec = SpecFor(ColdDecode(), Arch::kSm80, Accumulate::kFloat32);
  const Kernel* const kernel = FindKernel(spec);
  if (kernel == nullptr) Fail(ExplainMissing(spec).c_str());
  return *kernel;
}

int Attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  Check(cudaGetDevice(&device), "find the device");
  Check(cudaDeviceGetAttribute(&value, attribute, device), "read a device attribute");
  return value;
}

size_t SetAside(size_t bytes) {
  Check(cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, bytes), "set L2 aside");
  Check(cudaDeviceGetLimit(&bytes, cudaLimitPersistingL2CacheSize), "read what is set aside");
  return bytes;
}

// No window if `bytes` is 0.
void SetWindow(cudaStream_t stream, const std::byte* base, size_t bytes, float hit_ratio) {
  cudaStreamAttrValue value = {};
  value.accessPolicyWindow.base_ptr = const_cast<std::byte*>(base);
  value.accessPolicyWindow.num_bytes = bytes;
  value.accessPolicyWindow.hitRatio = hit_ratio;
  value.accessPolicyWindow.hitProp =
      bytes > 0 ? cudaAccessPropertyPersisting : cudaAccessPropertyNormal;
  value.accessPolicyWindow.missProp =
      bytes > 0 ? cudaAccessPropertyStreaming : cudaAccessPropertyNormal;
  Check(cudaStreamSetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &value),
        "set an access-policy window");
}

}  // namespace

L2Experiment::L2Experiment(int hot_sequences)
    : hot_sequences_(hot_sequences),
      hot_stream_(MakeStream()),
      hot_inputs_(Decode(hot_sequences), 1, hot_stream_.get()),
      cold_inputs_(ColdDecode(), kColdSets, hot_stream_.get()) {
  const Kernel& kernel = DecodeKernel();
  const AttentionShape shape = Decode(hot_sequences);
  Check(hot_run_.Prepare(kernel, shape.geometry(), hot_inputs_.spans()), "prepare a launch");
  for (CudaEvent* event : {&lead_, &cold_done_[0], &cold_done_[1]}) {
    Check(cudaEventCreateWithFlags(event->out(), cudaEventDisableTiming), "create an event");
  }
  for (int i = 0; i < kBatch; ++i) {
    Check(cudaEventCreate(begin_[i].out()), "create an event");
    Check(cudaEventCreate(end_[i].out()), "create an event");
  }
  const auto sets = cold_inputs_.spans().begin();
  for (int s = 0; s < kColdStreams; ++s) {
    constexpr int kShare = kColdSets / kColdStreams;
    cold_streams_[s] = MakeStream();
    Check(cold_runs_[s].Prepare(kernel, shape.geometry(),
                                {sets + s * kShare, sets + (s + 1) * kShare}),
          "prepare a cold launch");
  }
  LaunchHot(0);
  Synchronise();
  const Accuracy accuracy = CheckOutput(shape, hot_inputs_.CopyToHost(0).spans, 1);
  if (!accuracy.finite || accuracy.max_error > ErrorBound(kernel.spec)) {
    Fail("the kernel's output is wrong: see flashcore-kernel-bench");
  }
  output_ = HotOutput();
}

L2Experiment::Granted L2Experiment::SetMode(L2Mode mode) {
  Synchronise();
  Check(cudaCtxResetPersistingL2Cache(), "reset persisting lines");
  size_t ask = Attribute(cudaDevAttrMaxPersistingL2CacheSize);
  if (mode == L2Mode::kWithout) ask = 0;
  if (mode == L2Mode::kHalf) ask /= 2;
  Granted granted;
  granted.set_aside_bytes = SetAside(ask);
  size_t window_bytes = 0;
  if (mode != L2Mode::kWithout) {
    window_bytes = std::min<size_t>(hot_bytes(), Attribute(cudaDevAttrMaxAccessPolicyWindowSize));
    granted.hit_ratio = std::min(
        1.0f, static_cast<float>(granted.set_aside_bytes) / static_cast<float>(window_bytes));
  }
  const std::byte* const base = hot_inputs_.spans()[0][0].kv.key;
  SetWindow(hot_stream_.get(), base, window_bytes, granted.hit_ratio);
  for (const CudaStream& stream : cold_streams_) {
    SetWindow(stream.get(), base, window_bytes, granted.hit_ratio);
  }
  return granted;
}

Percentiles L2Experiment::Time(const ColdTraffic& traffic, int repeats) {
  std::vector<double> us;
  while (us.size() < static_cast<size_t>(repeats)) {
    RunBatch(traffic);
    Synchronise();
    for (int i = 1; i < kBatch; ++i) {
      float ms = 0;
      Check(cudaEventElapsedTime(&ms, begin_[i].get(), end_[i].get()), "read the time");
      us.push_back(ms * 1e3);
    }
  }
  if (HotOutput() != output_) Fail("the output's bits have changed");
  return Summarise(std::move(us));
}

void L2Experiment::Profile(size_t cold_bytes, int launches) {
  constexpr int kWarmUpLaunches = 3;
  for (int n = 0; n < kWarmUpLaunches + launches; ++n) {
    LaunchColdBetween(cold_bytes);
    Synchronise();
    if (n >= kWarmUpLaunches) Check(cudaProfilerStart(), "start the profiler");
    Check(hot_run_.Launch(0, hot_stream_.get()), "launch the kernel");
    Synchronise();
    if (n >= kWarmUpLaunches) Check(cudaProfilerStop(), "stop the profiler");
  }
}

void L2Experiment::RunBatch(const ColdTraffic& traffic) {
  LaunchColdBetween(kLeadLaunches * kColdLaunchBytes);
  Check(cudaEventRecord(lead_.get(), hot_stream_.get()), "record an event");
  for (int s = 0; s < kColdStreams; ++s) {
    Check(cudaStreamWaitEvent(cold_streams_[s].get(), lead_.get(), 0), "wait for an event");
  }
  for (int i = 0; i < kBatch; ++i) Repeat(traffic, i);
}

void L2Experiment::Repeat(const ColdTraffic& traffic, int i) {
  const int launches = static_cast<int>(traffic.bytes / kColdLaunchBytes);
  if (!traffic.concurrent) {
    LaunchColdBetween(traffic.bytes);
    LaunchHot(i);
    return;
  }
  // Hot launch i and the cold ones that follow it start when those of i - 1 have ended.
  for (int s = 0; s < kColdStreams && launches > 0 && i > 0; ++s) {
    Check(cudaStreamWaitEvent(hot_stream_.get(), cold_done_[s].get(), 0), "wait for an event");
    Check(cudaStreamWaitEvent(cold_streams_[s].get(), end_[i - 1].get(), 0), "wait for an event");
  }
  LaunchHot(i);
  LaunchColdBeside(launches > 0 ? launches : kEndlessLaunches);
}

void L2Experiment::LaunchHot(int i) {
  Check(cudaEventRecord(begin_[i].get(), hot_stream_.get()), "record an event");
  Check(hot_run_.Launch(0, hot_stream_.get()), "launch the kernel");
  Check(cudaEventRecord(end_[i].get(), hot_stream_.get()), "record an event");
}

void L2Experiment::LaunchColdBetween(size_t bytes) {
  for (size_t launched = 0; launched < bytes; launched += kColdLaunchBytes, ++next_cold_) {
    const KernelRun& run = cold_runs_[next_cold_ % kColdStreams];
    Check(run.Launch(next_cold_ / kColdStreams % run.num_sets(), hot_stream_.get()),
          "launch the kernel on cold K/V");
  }
}

void L2Experiment::LaunchColdBeside(int launches) {
  for (const int end = next_cold_ + launches; next_cold_ < end; ++next_cold_) {
    const int s = next_cold_ % kColdStreams;
    Check(cold_runs_[s].Launch(next_cold_ / kColdStreams % cold_runs_[s].num_sets(),
                               cold_streams_[s].get()),
          "launch the kernel on cold K/V");
  }
  for (int s = 0; s < kColdStreams; ++s) {
    Check(cudaEventRecord(cold_done_[s].get(), cold_streams_[s].get()), "record an event");
  }
}

void L2Experiment::Synchronise() { Check(cudaDeviceSynchronize(), "run the launches"); }

std::vector<std::byte> L2Experiment::HotOutput() const {
  const AttentionShape shape = Decode(static_cast<int>(hot_sequences_));
  std::vector<std::byte> output(QueryBytes(shape));
  Check(cudaMemcpy(output.data(), hot_inputs_.spans()[0][0].output, output.size(),
                   cudaMemcpyDeviceToHost),
        "read the output");
  return output;
}

}  // namespace flashcore::kernels
