#include "tests/bench/kernels/timing.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "tests/bench/kernels/device_kernels.h"

namespace flashcore::kernels {
namespace {

constexpr int kWarmUpRounds = 10;
constexpr int kCeilingRounds = 20;
constexpr size_t kCopyBytes = size_t{1} << 30;

// Nearest rank: the smallest time such that at least `fraction` of the sorted times are not larger.
double Percentile(const std::vector<double>& sorted, double fraction) {
  const double rank = std::ceil(fraction * static_cast<double>(sorted.size()));
  return sorted[static_cast<size_t>(rank) - 1];
}

CudaGraphExec CaptureLaunches(const KernelRun& run, int launches, cudaStream_t stream) {
  CudaGraph graph;
  CudaGraphExec replay;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin a capture");
  for (int n = 0; n < launches; ++n) {
    Check(run.Launch(n % run.num_sets(), stream), "launch the kernel in a capture");
  }
  Check(cudaStreamEndCapture(stream, graph.out()), "end a capture");
  Check(cudaGraphInstantiate(replay.out(), graph.get(), 0), "instantiate a graph");
  return replay;
}

// Calls `work`, which enqueues on `stream`, 10 times to warm up, then `rounds` times in pairs. Only
// the second of a pair is timed. Returns microseconds of each round.
std::vector<double> TimeRounds(int rounds, cudaStream_t stream, const std::function<void()>& work) {
  CudaEvent begin, end;
  Check(cudaEventCreate(begin.out()), "create an event");
  Check(cudaEventCreate(end.out()), "create an event");
  for (int round = 0; round < kWarmUpRounds; ++round) work();
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    work();  // keeps the device busy while the timed work is enqueued, so that no gap is timed
    Check(cudaEventRecord(begin.get(), stream), "record an event");
    work();
    Check(cudaEventRecord(end.get(), stream), "record an event");
    Check(cudaEventSynchronize(end.get()), "run the timed work");
    float milliseconds = 0;
    Check(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "read the time");
    times.push_back(milliseconds * 1e3);
  }
  return times;
}

}  // namespace

Percentiles Summarise(std::vector<double> us) {
  std::sort(us.begin(), us.end());
  return {Percentile(us, 0.5), Percentile(us, 0.9), Percentile(us, 0.99)};
}

RoundTimes TimeLaunches(const KernelRun& run, int launches, int rounds, cudaStream_t stream) {
  const CudaGraphExec replay = CaptureLaunches(run, launches, stream);
  std::vector<double> times = TimeRounds(
      rounds, stream, [&] { Check(cudaGraphLaunch(replay.get(), stream), "replay a graph"); });
  for (double& us : times) us /= launches;
  std::sort(times.begin(), times.end());
  return {Percentile(times, 0.5), times.front(), times.back()};
}

Ceilings MeasureCeilings(int multiprocessors, cudaStream_t stream) {
  DeviceMemory from, to;
  Check(cudaMalloc(from.out(), kCopyBytes), "allocate 1 GiB for the copy ceiling");
  Check(cudaMalloc(to.out(), kCopyBytes), "allocate 1 GiB for the copy ceiling");
  const Percentiles copy = Summarise(TimeRounds(kCeilingRounds, stream, [&] {
    Check(cudaMemcpyAsync(to.get(), from.get(), kCopyBytes, cudaMemcpyDeviceToDevice, stream),
          "copy 1 GiB");
  }));
  double flops = 0;
  const Percentiles spin = Summarise(TimeRounds(kCeilingRounds, stream, [&] {
    Check(SpinTensorCores(multiprocessors, static_cast<float*>(to.get()), stream, &flops),
          "launch the tensor ceiling");
  }));
  return {flops / spin.p50 * 1e-6, 2.0 * kCopyBytes / copy.p50 * 1e-3};
}

}  // namespace flashcore::kernels
