// Launches of the CUDA kernels behind a C interface, for compare_torch.py. Uses the current device.
// Not thread-safe.
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/bench/kernels/bench_options.h"
#include "tests/bench/kernels/kernel_run.h"
#include "tests/bench/kernels/shape.h"

namespace flashcore::kernels {

// A shape, as class Shape of compare_torch.py declares it.
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

}  // namespace

extern "C" {

// The message of the last call that failed.
const char* flashcore_kernel_bench_error() { return last_error.c_str(); }

// The name of named shape i; null if there are not so many.
const char* flashcore_kernel_bench_shape_name(int i) {
  return i < static_cast<int>(std::size(kNamedShapes)) ? kNamedShapes[i].name : nullptr;
}

// Parses a name or a shape (shape.h). Returns 0, or 1 on an error.
int flashcore_kernel_bench_parse_shape(const char* text, FlashcoreBenchShape* parsed) {
  BenchShape shape;
  last_error = ParseShape(text, &shape);
  if (!last_error.empty()) return 1;
  const auto& a = shape.attention;
  *parsed = {a.spans,    a.num_heads, a.num_kv_heads, a.query_rows, a.kv_rows,
             a.head_dim, a.mask.left, a.mask.right,   a.paged,      Flops(a)};
  return 0;
}

// Prepares launches of a shape on `sets` input sets. flags[num_flags] are those of
// flashcore-kernel-bench, with one --shape. query[s], key[s], value[s] and output[s] are device
// pointers to contiguous [spans, heads, rows, head_dim]; the caller keeps owning them. Returns null
// on an error. The caller frees the result with flashcore_kernel_bench_free.
FlashcoreBenchLaunches* flashcore_kernel_bench_new(const char* const* flags, int num_flags,
                                                   int sets, void* const* query, void* const* key,
                                                   void* const* value, void* const* output) {
  BenchOptions options;
  last_error = ParseBenchOptions({flags, flags + num_flags}, &options);
  if (!last_error.empty()) return nullptr;
  const AttentionShape& shape = options.shapes.front().attention;
  const KernelSpec spec = SpecFor(shape, options.arch, options.accumulate);
  const Kernel* kernel = FindKernel(spec);
  if (kernel == nullptr) last_error = "no such kernel: " + ExplainMissing(spec);
  if (shape.paged) last_error = "paged K/V is not [batch, heads, rows, head_dim]";
  if (!last_error.empty()) return nullptr;
  std::vector<std::vector<Span>> spans;
  for (int set = 0; set < sets; ++set) {
    Tensors tensors;
    tensors.query = static_cast<std::byte*>(query[set]);
    tensors.key = static_cast<std::byte*>(key[set]);
    tensors.value = static_cast<std::byte*>(value[set]);
    tensors.output = static_cast<std::byte*>(output[set]);
    spans.push_back(MakeSpans(shape, tensors));
  }
  auto launches = std::make_unique<FlashcoreBenchLaunches>();
  launches->kernel_name = KernelName(kernel->spec);
  const cudaError_t error = launches->run.Prepare(*kernel, shape.geometry(), std::move(spans));
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
}  // namespace flashcore::kernels
