#include "tests/bench/l2_experiment.h"

#include <cuda_profiler_api.h>

#include <algorithm>
#include <utility>

#include "tests/bench/kernels/accuracy.h"
#include "tests/bench/kernels/bench_options.h"
#include "tests/bench/kernels/device_kernels.h"

namespace flashcore::kernels {
namespace {

constexpr int kColdSets = 8;  // 512 MiB, many times any L2

// Cold launches before a batch, about 0.3 ms of an H200: while they run the host enqueues the
// batch, so that no wait for it is timed.
constexpr int kLeadLaunches = 16;

AttentionShape Decode(size_t kv_bytes) {
  constexpr size_t kMax = L2Experiment::kMaxSequenceBytes;
  AttentionShape shape;
  shape.paged = true;
  shape.spans = static_cast<int32_t>((kv_bytes + kMax - 1) / kMax);
  shape.num_heads = 32;
  shape.num_kv_heads = 8;
  shape.query_rows = 1;
  shape.kv_rows = static_cast<int32_t>(std::min(kv_bytes, kMax) >> 12);  // 4 KiB a row
  shape.head_dim = 128;
  return shape;
}

CudaStream MakeStream() {
  CudaStream stream;
  Check(cudaStreamCreateWithFlags(stream.out(), cudaStreamNonBlocking), "create a stream");
  return stream;
}

const Kernel& DecodeKernel() {
  const KernelSpec spec =
      SpecFor(Decode(L2Experiment::kColdLaunchBytes), Arch::kLargeShared, Accumulate::kFloat32);
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
void SetStreamWindow(cudaStream_t stream, const std::byte* base, size_t bytes, float hit_ratio) {
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

L2Experiment::L2Experiment(size_t hot_bytes, BackgroundReader* background)
    : hot_bytes_(hot_bytes),
      background_(background),
      stream_(MakeStream()),
      hot_inputs_(Decode(hot_bytes), 1, stream_.get()),
      cold_inputs_(Decode(kColdLaunchBytes), kColdSets, stream_.get()) {
  const Kernel& kernel = DecodeKernel();
  const AttentionShape shape = Decode(hot_bytes);
  Check(hot_run_.Prepare(kernel, shape.geometry(), hot_inputs_.spans()), "prepare a launch");
  Check(cold_run_.Prepare(kernel, shape.geometry(), cold_inputs_.spans()), "prepare a cold launch");
  for (int i = 0; i < kBatch; ++i) {
    Check(cudaEventCreate(begin_[i].out()), "create an event");
    Check(cudaEventCreate(end_[i].out()), "create an event");
  }
  LaunchCold(kColdLaunchBytes);  // loads its code: the driver may have to wait for a reader
  LaunchHot(0);
  Synchronise();
  const Accuracy accuracy = CheckOutput(shape, hot_inputs_.CopyToHost(0).spans, 1);
  if (!accuracy.finite || accuracy.max_error > ErrorBound(kernel.spec)) {
    Fail("the kernel's output is wrong: see flashcore-kernel-bench");
  }
  output_ = HotOutput();
}

L2Experiment::Granted L2Experiment::SetWindow(bool on) {
  Synchronise();
  Check(cudaCtxResetPersistingL2Cache(), "reset persisting lines");
  Granted granted;
  granted.set_aside_bytes = SetAside(
      on ? std::min<size_t>(hot_bytes_, Attribute(cudaDevAttrMaxPersistingL2CacheSize)) : 0);
  size_t window_bytes = 0;
  if (on) {
    window_bytes = std::min<size_t>(hot_bytes_, Attribute(cudaDevAttrMaxAccessPolicyWindowSize));
    granted.hit_ratio = std::min(
        1.0f, static_cast<float>(granted.set_aside_bytes) / static_cast<float>(window_bytes));
  }
  SetStreamWindow(stream_.get(), hot_inputs_.spans()[0][0].kv.key, window_bytes, granted.hit_ratio);
  return granted;
}

L2Experiment::Times L2Experiment::Time(const Traffic& traffic, int repeats) {
  std::vector<double> us;
  double background_gbps = 0;
  int batches = 0;
  for (; us.size() < static_cast<size_t>(repeats); ++batches) {
    background_gbps += RunBatch(traffic);
    for (int i = 1; i < kBatch; ++i) {
      float ms = 0;
      Check(cudaEventElapsedTime(&ms, begin_[i].get(), end_[i].get()), "read the time");
      us.push_back(ms * 1e3);
    }
  }
  if (HotOutput() != output_) Fail("the output's bits have changed");
  return {Summarise(std::move(us)), background_gbps / batches};
}

void L2Experiment::Profile(size_t cold_bytes, int launches) {
  constexpr int kWarmUpLaunches = 3;
  for (int n = 0; n < kWarmUpLaunches + launches; ++n) {
    LaunchCold(cold_bytes);
    Synchronise();
    if (n >= kWarmUpLaunches) Check(cudaProfilerStart(), "start the profiler");
    Check(hot_run_.Launch(0, stream_.get()), "launch the kernel");
    Synchronise();
    if (n >= kWarmUpLaunches) Check(cudaProfilerStop(), "stop the profiler");
  }
}

// Returns the rate of the background reader, 0 without one.
double L2Experiment::RunBatch(const Traffic& traffic) {
  const bool background = traffic.background_blocks > 0;
  if (background) background_->Start(traffic.background_blocks);
  LaunchCold(kLeadLaunches * kColdLaunchBytes);
  for (int i = 0; i < kBatch; ++i) {
    if (background && i == 1) background_->Mark(0, stream_.get());
    LaunchCold(traffic.cold_bytes);
    LaunchHot(i);
  }
  if (background) background_->Mark(1, stream_.get());
  Synchronise();
  if (!background) return 0;
  const double gbps = background_->Stop();
  if (gbps == 0) Fail("the background reader did not run beside the hot launches");
  return gbps;
}

void L2Experiment::LaunchHot(int i) {
  Check(cudaEventRecord(begin_[i].get(), stream_.get()), "record an event");
  Check(hot_run_.Launch(0, stream_.get()), "launch the kernel");
  Check(cudaEventRecord(end_[i].get(), stream_.get()), "record an event");
}

void L2Experiment::LaunchCold(size_t bytes) {
  for (size_t launched = 0; launched < bytes; launched += kColdLaunchBytes, ++next_cold_) {
    Check(cold_run_.Launch(next_cold_ % cold_run_.num_sets(), stream_.get()),
          "launch the kernel on cold K/V");
  }
}

void L2Experiment::Synchronise() {
  Check(cudaStreamSynchronize(stream_.get()), "run the launches");
}

std::vector<std::byte> L2Experiment::HotOutput() const {
  const AttentionShape shape = Decode(hot_bytes_);
  std::vector<std::byte> output(QueryBytes(shape));
  Check(cudaMemcpy(output.data(), hot_inputs_.spans()[0][0].output, output.size(),
                   cudaMemcpyDeviceToHost),
        "read the output");
  return output;
}

}  // namespace flashcore::kernels
