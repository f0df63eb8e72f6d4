// flashcore-cpu-bench [--threads=N] [Google Benchmark flags]
//
// Times the CPU kernel over named shapes, planning included. FLOP/s counts the two matrix products
// over what the mask lets the rows see; KV/s is bytes of K and V over time, the figure of merit of
// decode.
//
// The forks shapes exist twice: "shared" reads the common prefix once for several spans, "alone"
// once for each. Compare them in one run, interleaved:
//   flashcore-cpu-bench --threads=1 --benchmark_filter=forks --benchmark_repetitions=15
//       --benchmark_enable_random_interleaving=true --benchmark_report_aggregates_only=true
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kernels/bench/cpu_workload.h"
#include "kernels/cpu/attention_cpu.h"

namespace flashcore::kernels {
namespace {

struct NamedShape {
  const char* name;
  WorkloadShape shape;
};

constexpr DType kHalf = DType::kFloat16;
constexpr DType kBrain = DType::kBFloat16;
constexpr Mask kNone = Mask::None();
constexpr Mask kCausal = Mask::Causal();

// dtype, spans, heads, KV heads, query rows, K/V rows, head_dim, mask; prefix rows, share items
constexpr NamedShape kShapes[] = {
    {"prefill/f16/1x8x512x64", {{kHalf, 1, 8, 8, 512, 512, 64, kNone}}},
    {"prefill/f16/1x8x512x64/causal", {{kHalf, 1, 8, 8, 512, 512, 64, kCausal}}},
    {"prefill/bf16/1x8x512x64", {{kBrain, 1, 8, 8, 512, 512, 64, kNone}}},
    {"prefill/f16/1x8x2048x128", {{kHalf, 1, 8, 8, 2048, 2048, 128, kNone}}},
    {"prefill/f16/1x8x2048x128/causal", {{kHalf, 1, 8, 8, 2048, 2048, 128, kCausal}}},
    {"prefill/bf16/1x8x2048x128", {{kBrain, 1, 8, 8, 2048, 2048, 128, kNone}}},
    {"prefill/f16/1x8x1024x256", {{kHalf, 1, 8, 8, 1024, 1024, 256, kNone}}},
    {"chunk/f16/32_over_8/64_of_4096x128", {{kHalf, 1, 32, 8, 64, 4096, 128, kCausal}}},
    {"decode/f16/32_over_8/1_of_4096x128", {{kHalf, 1, 32, 8, 1, 4096, 128, kCausal}}},
    {"decode/bf16/32_over_8/1_of_4096x128", {{kBrain, 1, 32, 8, 1, 4096, 128, kCausal}}},
    {"decode/f16/32_over_32/1_of_4096x128", {{kHalf, 1, 32, 32, 1, 4096, 128, kCausal}}},
    {"decode/f16/32_over_8/8_spans/1_of_1024x128", {{kHalf, 8, 32, 8, 1, 1024, 128, kCausal}}},
    {"decode/f16/8_over_8/1_of_64x64", {{kHalf, 1, 8, 8, 1, 64, 64, kCausal}}},
    {"forks/f16/32_over_8/32_spans/1_of_4096x128/shared",
     {{kHalf, 32, 32, 8, 1, 4096 + 64, 128, kCausal}, 4096, true}},
    {"forks/f16/32_over_8/32_spans/1_of_4096x128/alone",
     {{kHalf, 32, 32, 8, 1, 4096 + 64, 128, kCausal}, 4096, false}},
    {"forks/f16/8_over_8/32_spans/1_of_4096x64/shared",
     {{kHalf, 32, 8, 8, 1, 4096 + 64, 64, kCausal}, 4096, true}},
    {"forks/f16/8_over_8/32_spans/1_of_4096x64/alone",
     {{kHalf, 32, 8, 8, 1, 4096 + 64, 64, kCausal}, 4096, false}},
};

void Attention(benchmark::State& state, const WorkloadShape& shape, int threads) {
  Workload workload(shape, threads);
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

// Takes --threads=N out of the arguments; without it, every core.
int TakeThreads(int* argc, char** argv) {
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  constexpr char kFlag[] = "--threads=";
  int kept = 1;
  for (int i = 1; i < *argc; ++i) {
    if (std::strncmp(argv[i], kFlag, sizeof(kFlag) - 1) == 0) {
      threads = std::atoi(argv[i] + sizeof(kFlag) - 1);
    } else {
      argv[kept++] = argv[i];
    }
  }
  *argc = kept;
  return threads < 1 ? 1 : threads;
}

int Main(int argc, char** argv) {
  const int threads = TakeThreads(&argc, argv);
  benchmark::AddCustomContext("simd_target", CpuSimdTarget());
  benchmark::AddCustomContext("threads", std::to_string(threads));
  for (const NamedShape& named : kShapes) {
    benchmark::RegisterBenchmark(
        named.name,
        [&named, threads](benchmark::State& state) { Attention(state, named.shape, threads); })
        ->ComputeStatistics("min", Minimum)
        ->UseRealTime()
        ->Unit(benchmark::kMicrosecond);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace
}  // namespace flashcore::kernels

int main(int argc, char** argv) { return flashcore::kernels::Main(argc, argv); }
