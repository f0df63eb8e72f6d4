// flashcore-cpu-bench [--threads=N] [Google Benchmark flags]
//
// Times the CPU kernel on a fixed list of shapes, planning included. FLOP/s counts the two matrix
// products over what the mask leaves visible. KV/s is bytes of K and V over time, the figure of
// merit of decode.
//
// Shapes with a prefix run twice: "cascade" reads the shared prefix once for several spans, "alone"
// once for each span. Compare them in one interleaved run:
//   flashcore-cpu-bench --threads=1 --benchmark_filter=prefix --benchmark_repetitions=15
//       --benchmark_enable_random_interleaving=true --benchmark_report_aggregates_only=true
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cpu/attention_cpu.h"
#include "tests/bench/kernels/cpu_workload.h"

namespace flashcore::kernels {
namespace {

constexpr DType kHalf = DType::kFloat16;
constexpr DType kBrain = DType::kBFloat16;

struct TypedShape {
  DType dtype;
  const char* shape;  // by the grammar of shape.h
};

constexpr TypedShape kShapes[] = {
    {kHalf, "1x8x512x64"},
    {kHalf, "1x8x512x64,causal"},
    {kBrain, "1x8x512x64"},
    {kHalf, "1x8x2048x128"},
    {kHalf, "1x8x2048x128,causal"},
    {kBrain, "1x8x2048x128"},
    {kHalf, "1x8x1024x256"},
    {kHalf, "1x32/8x4096x128,q=64,causal"},
    {kHalf, "1x32/8x4096x128,q=1,causal"},
    {kBrain, "1x32/8x4096x128,q=1,causal"},
    {kHalf, "1x32x4096x128,q=1,causal"},
    {kHalf, "8x32/8x1024x128,q=1,causal"},
    {kHalf, "1x8x64x64,q=1,causal"},
    {kHalf, "32x32/8x4160x128,q=1,causal,prefix=4096"},
    {kHalf, "32x8x4160x64,q=1,causal,prefix=4096"},
};

void Attention(benchmark::State& state, const AttentionShape& shape, int threads, bool cascade) {
  Workload workload(shape, threads, cascade);
  for (auto _ : state) workload.Run();
  const double runs = static_cast<double>(state.iterations());
  state.counters["FLOP/s"] = benchmark::Counter(Flops(shape) * runs, benchmark::Counter::kIsRate);
  state.counters["KV/s"] =
      benchmark::Counter(static_cast<double>(KvBytes(shape)) * runs, benchmark::Counter::kIsRate,
                         benchmark::Counter::kIs1024);
}

double Minimum(const std::vector<double>& times) {
  return *std::min_element(times.begin(), times.end());
}

void Register(const std::string& name, const AttentionShape& shape, int threads, bool cascade) {
  const auto run = [=](benchmark::State& state) { Attention(state, shape, threads, cascade); };
  benchmark::RegisterBenchmark(name.c_str(), run)
      ->ComputeStatistics("min", Minimum)
      ->UseRealTime()
      ->Unit(benchmark::kMicrosecond);
}

// Removes --threads=N from the arguments and returns N. Default: every core.
int TakeThreads(int* argc, char** argv) {
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  const auto is_other = [&](const char* argument) {
    return std::sscanf(argument, "--threads=%d", &threads) != 1;
  };
  *argc = static_cast<int>(std::stable_partition(argv + 1, argv + *argc, is_other) - argv);
  return std::max(threads, 1);
}

int Main(int argc, char** argv) {
  const int threads = TakeThreads(&argc, argv);
  benchmark::AddCustomContext("simd_target", CpuSimdTarget());
  benchmark::AddCustomContext("threads", std::to_string(threads));
  for (const TypedShape& typed : kShapes) {
    BenchShape shape;
    const std::string error = ParseShape(typed.shape, &shape);
    if (!error.empty()) {
      std::fprintf(stderr, "flashcore-cpu-bench: %s\n", error.c_str());
      return 1;
    }
    shape.attention.dtype = typed.dtype;
    const std::string name = std::string(Name(typed.dtype)) + "/" + typed.shape;
    if (shape.attention.prefix_rows == 0) {
      Register(name, shape.attention, threads, true);
    } else {
      Register(name + "/cascade", shape.attention, threads, true);
      Register(name + "/alone", shape.attention, threads, false);
    }
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace
}  // namespace flashcore::kernels

int main(int argc, char** argv) { return flashcore::kernels::Main(argc, argv); }
