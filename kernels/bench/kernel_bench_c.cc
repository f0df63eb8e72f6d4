// Launches of the CUDA kernels behind a C interface, for compare_torch.py. Works on the current
// device. Not thread-safe.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/bench/bench_options.h"
#include "kernels/bench/device_spans.h"
#include "kernels/bench/kernel_run.h"
#include "kernels/bench/named_shapes.h"

using flashcore::kernels::BenchShape;
using flashcore::kernels::DeviceTensors;
using flashcore::kernels::Kernel;
using flashcore::kernels::KernelRun;
using flashcore::kernels::KernelSpec;
using flashcore::kernels::NamedShapes;
using flashcore::kernels::Span;

// A shape as compare_torch.py reads it.
struct FlashcoreBenchShape {
  int32_t spans, num_heads, num_kv_heads, query_rows, kv_rows, head_dim;
  int32_t mask_left, mask_right;  // INT32_MAX: unbounded
  int32_t paged;
  double flops;
};

struct FlashcoreBenchLaunches {
  KernelRun run;
  std::string kernel_name;
};

namespace {

std::string last_error;

// Parses what to launch. Returns what is wrong; empty if nothing is.
std::string ParseLaunch(const char* shape_text, const char* arch_name, const char* dtype_name,
                        const char* accumulate_name, BenchShape* shape, KernelSpec* spec) {
  std::string error = ParseShape(shape_text, shape);
  if (error.empty()) error = ParseArch(arch_name, &spec->arch);
  if (error.empty()) error = ParseDType(dtype_name, &shape->attention.dtype);
  if (error.empty()) error = ParseAccumulate(accumulate_name, &spec->accumulate);
  if (!error.empty()) return error;
  if (shape->paged) return "paged K/V is not for tensors of [batch, heads, rows, head_dim]";
  *spec = SpecFor(*shape, spec->arch, spec->accumulate);
  return "";
}

std::byte* At(void* const* pointers, int set) { return static_cast<std::byte*>(pointers[set]); }

}  // namespace

extern "C" {

// What the last call that failed says.
const char* flashcore_kernel_bench_error() { return last_error.c_str(); }

// Name i of the named shapes; null from their number on.
const char* flashcore_kernel_bench_shape_name(int i) {
  return i < static_cast<int>(NamedShapes().size()) ? NamedShapes()[i].name : nullptr;
}

// Parses a name or a shape (named_shapes.h). Returns 0, or 1 on an error.
int flashcore_kernel_bench_parse_shape(const char* text, FlashcoreBenchShape* parsed) {
  BenchShape shape;
  last_error = ParseShape(text, &shape);
  if (!last_error.empty()) return 1;
  const auto& a = shape.attention;
  *parsed = {a.spans,    a.num_heads, a.num_kv_heads, a.query_rows, a.kv_rows,
             a.head_dim, a.mask.left, a.mask.right,   shape.paged,  Flops(a)};
  return 0;
}

// Prepares launches on `sets` input sets. query[s], key[s], value[s] and output[s] are the device
// pointers of set s, [spans, heads, rows, head_dim], contiguous, and stay the caller's. Returns
// null on an error; the caller frees the result with flashcore_kernel_bench_free.
FlashcoreBenchLaunches* flashcore_kernel_bench_new(const char* shape_text, const char* arch,
                                                   const char* dtype, const char* accumulate,
                                                   int sets, void* const* query, void* const* key,
                                                   void* const* value, void* const* output) {
  BenchShape shape;
  KernelSpec spec;
  last_error = ParseLaunch(shape_text, arch, dtype, accumulate, &shape, &spec);
  if (!last_error.empty()) return nullptr;
  const Kernel* kernel = FindKernel(spec);
  if (kernel == nullptr) {
    last_error = "no such kernel: " + ExplainMissing(spec);
    return nullptr;
  }
  std::vector<std::vector<Span>> spans;
  for (int set = 0; set < sets; ++set) {
    DeviceTensors tensors;
    tensors.query = At(query, set);
    tensors.key = At(key, set);
    tensors.value = At(value, set);
    tensors.output = At(output, set);
    spans.push_back(MakeSpans(shape.attention, tensors));
  }
  auto launches = std::make_unique<FlashcoreBenchLaunches>();
  launches->kernel_name = KernelName(kernel->spec);
  const cudaError_t error =
      launches->run.Prepare(*kernel, shape.attention.geometry(), std::move(spans));
  if (error != cudaSuccess) {
    last_error = std::string("cannot prepare the launch: ") + cudaGetErrorString(error);
    return nullptr;
  }
  return launches.release();
}

void flashcore_kernel_bench_free(FlashcoreBenchLaunches* launches) { delete launches; }

const char* flashcore_kernel_bench_kernel_name(const FlashcoreBenchLaunches* launches) {
  return launches->kernel_name.c_str();
}

// Launches on input set `set` in `stream` (a cudaStream_t). Returns 0, or 1 on an error.
int flashcore_kernel_bench_launch(const FlashcoreBenchLaunches* launches, int set, void* stream) {
  const cudaError_t error = launches->run.Launch(set, static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return 0;
  last_error = std::string("cannot launch: ") + cudaGetErrorString(error);
  return 1;
}

}  // extern "C"
