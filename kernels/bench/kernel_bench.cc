// flashcore-kernel-bench: checks the CUDA attention kernels against the float64 oracle and times
// those that are right. bench_options.h has the command line.
#include <cuda_profiler_api.h>

#include <cstdio>
#include <string>
#include <vector>

#include "kernels/bench/accuracy.h"
#include "kernels/bench/bench_options.h"
#include "kernels/bench/cuda_check.h"
#include "kernels/bench/input_sets.h"
#include "kernels/bench/kernel_run.h"
#include "kernels/bench/report.h"
#include "kernels/bench/timing.h"
#include "kernels/smxx/cuda_raii.h"

namespace flashcore::kernels {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitNoGpu = 2;
constexpr int kProfiledLaunches = 3;

// Everything that benches share.
struct Context {
  const BenchOptions& options;
  Device device;
  CudaStream stream;
  Ceilings ceilings;
};

int Attribute(cudaDeviceAttr attribute) {
  int value = 0;
  Check(cudaDeviceGetAttribute(&value, attribute, 0), "read a device attribute");
  return value;
}

Device DescribeDevice() {
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, 0), "read the device's properties");
  return {properties.name, properties.multiProcessorCount, Attribute(cudaDevAttrClockRate),
          properties.l2CacheSize};
}

// Why there is no GPU to run on; empty if there is one.
std::string WhyNoGpu() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return count > 0 ? "" : "the driver knows none";
}

// The kernel for `shape`; null, with its absence reported, if there is none.
const Kernel* FindOrReport(const BenchShape& shape, const BenchOptions& options) {
  const KernelSpec spec = SpecFor(shape, options.arch, options.accumulate);
  const Kernel* kernel = FindKernel(spec);
  if (kernel == nullptr) PrintFailure(shape.name, "no such kernel: " + ExplainMissing(spec));
  return kernel;
}

// Why `accuracy` is not good enough; empty if it is.
std::string WhyWrong(const Accuracy& accuracy, double bound) {
  if (!accuracy.finite) return "NaN or infinity in the output";
  if (accuracy.max_error <= bound) return "";
  char text[80];
  std::snprintf(text, sizeof(text), "largest error %.2e exceeds %.0e", accuracy.max_error, bound);
  return text;
}

// Checks and times one shape. Returns whether it passed; then the result is in `results`.
bool Bench(const Context& context, const BenchShape& shape, std::vector<Result>* results) {
  const BenchOptions& options = context.options;
  cudaStream_t stream = context.stream.get();
  const Kernel* kernel = FindOrReport(shape, options);
  if (kernel == nullptr) return false;
  const int sets = options.sets > 0 ? options.sets : ChooseSets(shape.attention, options.launches);
  const InputSets inputs(shape, sets, stream);
  KernelRun run;
  Check(run.Prepare(*kernel, shape.attention.geometry(), inputs.spans()), "prepare a launch");
  Check(run.Launch(0, stream), "launch the kernel");
  Check(cudaStreamSynchronize(stream), "run the kernel");

  Result result;
  result.shape = shape.name;
  result.kernel = KernelName(kernel->spec);
  result.accuracy = CheckOutput(shape.attention, inputs.spans().front(), inputs.pages());
  const std::string why_wrong = WhyWrong(result.accuracy, ErrorBound(kernel->spec));
  if (!why_wrong.empty()) {
    PrintFailure(shape.name, result.kernel + ": " + why_wrong);
    return false;
  }
  result.us = TimeLaunches(run, options.launches, options.rounds, stream);
  result.flops = Flops(shape.attention);
  result.set_bytes = SetBytes(shape.attention);
  result.sets = sets;
  PrintResult(result, context.device, context.ceilings);
  results->push_back(result);
  return true;
}

// Launches one shape for a profiler to look at. Returns whether there is a kernel for it.
bool Profile(const Context& context, const BenchShape& shape) {
  cudaStream_t stream = context.stream.get();
  const Kernel* kernel = FindOrReport(shape, context.options);
  if (kernel == nullptr) return false;
  const InputSets inputs(shape, 1, stream);
  KernelRun run;
  Check(run.Prepare(*kernel, shape.attention.geometry(), inputs.spans()), "prepare a launch");
  Check(cudaStreamSynchronize(stream), "fill the inputs");
  Check(cudaProfilerStart(), "start the profiler");
  for (int n = 0; n < kProfiledLaunches; ++n) Check(run.Launch(0, stream), "launch the kernel");
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
  for (const BenchShape& shape : options.shapes) passed = Bench(context, shape, &results) && passed;
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
    for (const NamedShape& named : NamedShapes())
      std::printf("%-16s %s\n", named.name, named.shape);
    return 0;
  }
  const std::string why_no_gpu = WhyNoGpu();
  if (!why_no_gpu.empty()) {
    std::fprintf(stderr, "flashcore-kernel-bench: no GPU: %s\n", why_no_gpu.c_str());
    return kExitNoGpu;
  }
  return RunShapes(options);
}

}  // namespace
}  // namespace flashcore::kernels

int main(int argc, char** argv) { return flashcore::kernels::Main({argv + 1, argv + argc}); }
