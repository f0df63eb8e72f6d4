#include "kernels/smxx/combine.h"
#include "kernels/smxx/launch.cuh"
#include "kernels/smxx/row_output.cuh"

namespace flashcore::kernels {
namespace {

constexpr int kThreads = 128;

struct CombineParams {
  const Span* spans;
  const CombineItem* combines;
  Partials partials;
  int32_t group;
};

// One block per CombineItem; a thread merges one chunk of one row after the other.
template <class Element>
__global__ void __launch_bounds__(kThreads) CombineKernel(const CombineParams params) {
  const CombineItem item = params.combines[blockIdx.x];
  const Span span = params.spans[item.span];
  const Partials& partials = params.partials;
  const int chunks = partials.head_dim / kChunk;
  for (int i = threadIdx.x; i < item.row_count * chunks; i += kThreads) {
    const int row = i / chunks;
    const int chunk = i % chunks;
    const int32_t first = item.first_partial_row + row;  // the row's share of split 0
    RowChunk merged;
    for (int split = 0; split < item.num_splits; ++split) {
      merged.max = fmaxf(merged.max, partials.max[first + split * item.row_count]);
    }
    for (int split = 0; split < item.num_splits; ++split) {
      const int64_t from = first + split * item.row_count;
      merged.Add(partials.output + from * partials.head_dim + chunk * kChunk, partials.max[from],
                 partials.sum[from]);
    }
    WriteChunk<Element>(span, params.group, item.kv_head, item.row_begin + row, chunk, merged);
  }
}

}  // namespace

int LaunchCombine(const Geometry& geometry, const Span* spans, const CombineItem* combines,
                  int32_t count, const Partials& partials, void* stream) {
  if (count == 0) return cudaSuccess;
  const CombineParams params{spans, combines, partials, geometry.group()};
  const auto kernel =
      geometry.dtype == DType::kFloat16 ? CombineKernel<__half> : CombineKernel<__nv_bfloat16>;
  return LaunchKernel(kernel, dim3(count), kThreads, 0, stream, params);
}

}  // namespace flashcore::kernels
