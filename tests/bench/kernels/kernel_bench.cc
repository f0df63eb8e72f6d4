// flashcore-kernel-bench: checks the CUDA attention kernels against the float64 oracle and times
// the correct ones. Prints a table, and writes JSON for gate.py. bench_options.h has the command
// line. A shape with a prefix runs twice: as it is, spans may read the prefix together; "alone",
// each reads it.
#include <cuda_profiler_api.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_raii.h"
#include "tests/bench/kernels/accuracy.h"
#include "tests/bench/kernels/bench_options.h"
#include "tests/bench/kernels/device_kernels.h"
#include "tests/bench/kernels/input_sets.h"
#include "tests/bench/kernels/kernel_run.h"
#include "tests/bench/kernels/timing.h"

namespace flashcore::kernels {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitNoGpu = 2;
constexpr int kProfiledLaunches = 3;
constexpr double kMiB = 1 << 20;

struct Device {
  std::string name;
  int multiprocessors = 0;
  int clock_khz = 0;  // the SMs' maximum
  int l2_bytes = 0;
};

struct Result {
  std::string shape;
  std::string kernel;
  L2State l2 = L2State::kCold;
  int launches = 0;  // of a round
  RoundTimes us;
  double flops = 0;
  int64_t set_bytes = 0;  // Q, K, V and O, once
  int sets = 0;
  Accuracy accuracy;

  double tflops() const { return flops / us.median * 1e-6; }
  double gbps() const { return static_cast<double>(set_bytes) / us.median * 1e-3; }
};

struct Context {
  const BenchOptions& options;
  Device device;
  CudaStream stream;
  Ceilings ceilings;
};

Device DescribeDevice() {
  cudaDeviceProp properties;
  int clock_khz = 0;
  Check(cudaGetDeviceProperties(&properties, 0), "read the device's properties");
  Check(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, 0), "read the clock rate");
  return {properties.name, properties.multiProcessorCount, clock_khz, properties.l2CacheSize};
}

void PrintHeader(const Device& device, const Ceilings& ceilings) {
  std::printf("GPU: %s, %d SMs at up to %.0f MHz, L2 %.1f MiB\n", device.name.c_str(),
              device.multiprocessors, device.clock_khz * 1e-3, device.l2_bytes / kMiB);
  std::printf("Ceilings, measured now: tensor %.1f TFLOP/s (mma.sync.m16n8k16 f16, f32 sums), ",
              ceilings.tensor_tflops);
  std::printf("copy %.0f GB/s (read + written)\n\n", ceilings.copy_gbps);
  std::printf("us: median, least and most of the rounds, each the mean of its launches\n");
  std::printf("%-24s %-28s %-4s %9s %9s %9s %8s %8s %7s %7s %9s %9s %15s %s\n", "shape", "kernel",
              "L2", "us", "least", "most", "TFLOP/s", "GB/s", "tensor", "copy", "max err", "rel L2",
              "rows checked", "sets");
}

void PrintResult(const Result& result, const Device& device, const Ceilings& ceilings) {
  const double all_bytes = static_cast<double>(result.set_bytes) * result.sets;
  std::printf("%-24s %-28s %-4s %9.2f %9.2f %9.2f %8.1f %8.1f %6.1f%% %6.1f%% %9.2e %9.2e",
              result.shape.c_str(), result.kernel.c_str(), Name(result.l2), result.us.median,
              result.us.least, result.us.most, result.tflops(), result.gbps(),
              100 * result.tflops() / ceilings.tensor_tflops,
              100 * result.gbps() / ceilings.copy_gbps, result.accuracy.max_error,
              result.accuracy.relative_l2());
  std::printf(" %7" PRId64 "/%-7" PRId64 " %d x %.2f MiB = %.1f L2\n", result.accuracy.rows_checked,
              result.accuracy.rows, result.sets, static_cast<double>(result.set_bytes) / kMiB,
              all_bytes / device.l2_bytes);
  std::fflush(stdout);
}

void PrintFailure(const std::string& shape, const std::string& why) {
  std::printf("%-24s FAILED: %s\n", shape.c_str(), why.c_str());
  std::fflush(stdout);
}

// A list of results. Returns whether the file was written.
bool WriteJson(const std::string& file, const std::vector<Result>& results, const Device& device,
               const Ceilings& ceilings) {
  std::FILE* out = std::fopen(file.c_str(), "w");
  if (out == nullptr) return false;
  std::fprintf(out, "[");
  const char* separator = "\n";
  for (const Result& result : results) {
    std::fprintf(out, "%s {\"tool\": \"flashcore-kernel-bench\", \"gpu\": \"%s\",\n", separator,
                 device.name.c_str());
    std::fprintf(out, "  \"shape\": \"%s\", \"kernel\": \"%s\", \"l2\": \"%s\",\n",
                 result.shape.c_str(), result.kernel.c_str(), Name(result.l2));
    std::fprintf(out, "  \"us\": %.4f, \"us_least\": %.4f, \"us_most\": %.4f,\n", result.us.median,
                 result.us.least, result.us.most);
    std::fprintf(
        out, "  \"tflops\": %.3f, \"gbps\": %.3f, \"max_err\": %.3e, \"relative_l2\": %.3e,\n",
        result.tflops(), result.gbps(), result.accuracy.max_error, result.accuracy.relative_l2());
    std::fprintf(out, "  \"fraction_of_tensor\": %.4f, \"fraction_of_copy\": %.4f,\n",
                 result.tflops() / ceilings.tensor_tflops, result.gbps() / ceilings.copy_gbps);
    std::fprintf(out, "  \"launches\": %d, \"sets\": %d, \"set_bytes\": %" PRId64 "}",
                 result.launches, result.sets, result.set_bytes);
    separator = ",\n";
  }
  std::fprintf(out, "\n]\n");
  const bool written = std::ferror(out) == 0;
  return std::fclose(out) == 0 && written;
}

// A kernel on the inputs of a shape, ready to launch.
struct Case {
  const Kernel* kernel;
  InputSets inputs;
  KernelRun run;
};

// Null, with the reason printed, if there is no kernel for `shape`. cascade: whether the plan may
// share work items among spans with a shared prefix.
std::unique_ptr<Case> Prepare(const Context& context, const BenchShape& shape, bool cascade,
                              int sets) {
  const BenchOptions& options = context.options;
  const KernelSpec spec = SpecFor(shape.attention, options.arch, options.accumulate);
  const Kernel* kernel = FindKernel(spec);
  if (kernel == nullptr) {
    PrintFailure(shape.name, "no such kernel: " + ExplainMissing(spec));
    return nullptr;
  }
  auto ready = std::unique_ptr<Case>(
      new Case{kernel, InputSets(shape.attention, sets, context.stream.get()), {}});
  Check(ready->run.Prepare(*kernel, shape.attention.geometry(), ready->inputs.spans(), cascade),
        "prepare a launch");
  Check(cudaStreamSynchronize(context.stream.get()), "fill the inputs");
  return ready;
}

// Why `accuracy` fails; empty if it passes.
std::string WhyWrong(const Accuracy& accuracy, double bound) {
  if (!accuracy.finite) return "NaN or infinity in the output";
  if (accuracy.max_error <= bound) return "";
  char text[80];
  std::snprintf(text, sizeof(text), "largest error %.2e exceeds %.0e", accuracy.max_error, bound);
  return text;
}

// Launches each set once and checks every output. Returns the accuracy of all sets together.
Accuracy CheckSets(const Context& context, const BenchShape& shape, const Case& ready) {
  cudaStream_t stream = context.stream.get();
  const int sets = ready.run.num_sets();
  for (int set = 0; set < sets; ++set) Check(ready.run.Launch(set, stream), "launch the kernel");
  Check(cudaStreamSynchronize(stream), "run the kernel");
  Accuracy all;
  for (int set = 0; set < sets; ++set) {
    all.Add(CheckOutput(shape.attention, ready.inputs.CopyToHost(set).spans, sets));
  }
  return all;
}

// Checks and times one shape. Returns whether it passed; if so, appends to `results`.
bool Bench(const Context& context, const BenchShape& shape, bool cascade, L2State l2,
           std::vector<Result>* results) {
  const BenchOptions& options = context.options;
  const int sets = SetsFor(shape.attention, l2, context.device.l2_bytes);
  if (sets == 0) return true;  // never warm
  const std::unique_ptr<Case> ready = Prepare(context, shape, cascade, sets);
  if (ready == nullptr) return false;

  Result result;
  result.shape = shape.name + (cascade ? "" : " alone");
  result.kernel = KernelName(ready->kernel->spec);
  result.l2 = l2;
  result.accuracy = CheckSets(context, shape, *ready);
  const std::string why_wrong = WhyWrong(result.accuracy, ErrorBound(ready->kernel->spec));
  if (!why_wrong.empty()) {
    PrintFailure(shape.name, result.kernel + ": " + why_wrong);
    return false;
  }
  result.launches = std::max(options.launches, sets);
  result.us = TimeLaunches(ready->run, result.launches, options.rounds, context.stream.get());
  result.flops = Flops(shape.attention);
  result.set_bytes = SetBytes(shape.attention);
  result.sets = sets;
  PrintResult(result, context.device, context.ceilings);
  results->push_back(result);
  return true;
}

// Launches one shape under a profiler. Returns whether there is a kernel for it.
bool Profile(const Context& context, const BenchShape& shape) {
  cudaStream_t stream = context.stream.get();
  const std::unique_ptr<Case> ready = Prepare(context, shape, true, 1);
  if (ready == nullptr) return false;
  Check(cudaProfilerStart(), "start the profiler");
  for (int n = 0; n < kProfiledLaunches; ++n) {
    Check(ready->run.Launch(0, stream), "launch the kernel");
  }
  Check(cudaStreamSynchronize(stream), "run the kernel");
  Check(cudaProfilerStop(), "stop the profiler");
  return true;
}

int RunShapes(const BenchOptions& options) {
  Context context{options, DescribeDevice(), {}, {}};
  Check(cudaStreamCreateWithFlags(context.stream.out(), cudaStreamNonBlocking), "create a stream");
  bool passed = true;
  if (options.profile) {
    for (const BenchShape& shape : options.shapes) passed = Profile(context, shape) && passed;
    return passed ? 0 : kExitFailed;
  }
  context.ceilings = MeasureCeilings(context.device.multiprocessors, context.stream.get());
  PrintHeader(context.device, context.ceilings);
  std::vector<Result> results;
  for (const BenchShape& shape : options.shapes) {
    for (const L2State l2 : options.l2) {
      passed = Bench(context, shape, true, l2, &results) && passed;
      // Without the cascade, too, where there can be one.
      if (shape.attention.prefix_rows == 0) continue;
      passed = Bench(context, shape, false, l2, &results) && passed;
    }
  }
  if (!options.json_file.empty() &&
      !WriteJson(options.json_file, results, context.device, context.ceilings)) {
    std::fprintf(stderr, "flashcore-kernel-bench: cannot write %s\n", options.json_file.c_str());
    return kExitFailed;
  }
  return passed ? 0 : kExitFailed;
}

int Main(const std::vector<std::string>& arguments) {
  BenchOptions options;
  const std::string error = ParseBenchOptions(arguments, &options);
  if (!error.empty()) {
    std::fprintf(stderr, "flashcore-kernel-bench: %s\n", error.c_str());
    return kExitFailed;
  }
  if (options.help) {
    std::fputs(kBenchUsage, stdout);
    return 0;
  }
  if (options.list) {
    for (const NamedShape& named : kNamedShapes) std::printf("%-16s %s\n", named.name, named.shape);
    return 0;
  }
  int gpus = 0;  // never 0 without an error
  if (const cudaError_t no_gpu = cudaGetDeviceCount(&gpus); no_gpu != cudaSuccess) {
    std::fprintf(stderr, "flashcore-kernel-bench: no GPU: %s\n", cudaGetErrorString(no_gpu));
    return kExitNoGpu;
  }
  return RunShapes(options);
}

}  // namespace
}  // namespace flashcore::kernels

int main(int argc, char** argv) { return flashcore::kernels::Main({argv + 1, argv + argc}); }
