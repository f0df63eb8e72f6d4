// A Workload behind a C interface, for compare_cpu.py.
#include "kernels/cpu/attention_cpu.h"
#include "kernels/half.h"
#include "tests/bench/kernels/cpu_workload.h"

namespace flashcore::kernels {
namespace {

// Writes [spans, heads, rows, head_dim] as float32. address(span, head, row) is where a row starts.
template <class Address>
void Export(const Workload& workload, int heads, int rows, const Address& address, float* to) {
  for (const Span& span : workload.spans()) {
    for (int head = 0; head < heads; ++head) {
      for (int row = 0; row < rows; ++row) {
        const auto* from = reinterpret_cast<const uint16_t*>(address(span, head, row));
        for (int d = 0; d < workload.shape().head_dim; ++d) {
          *to++ = ToFloat(workload.shape().dtype, from[d]);
        }
      }
    }
  }
}

int64_t KvOffset(const KvView& kv, int head, int row) {
  return kv.pages[row / kPageTokens] * kv.page_stride + head * kv.head_stride +
         row % kPageTokens * kv.row_stride;
}

}  // namespace

extern "C" {

// A float16 workload of `shape`, by the grammar of shape.h; null if it is wrong. The caller frees
// it with flashcore_bench_free.
Workload* flashcore_bench_new(const char* shape, int threads) {
  BenchShape parsed;
  if (!ParseShape(shape, &parsed).empty()) return nullptr;
  return new Workload(parsed.attention, threads);
}

void flashcore_bench_free(Workload* workload) { delete workload; }

void flashcore_bench_run(Workload* workload) { workload->Run(); }

// All tensors are written as float32 [spans, heads, rows, head_dim].
void flashcore_bench_inputs(const Workload* workload, float* query, float* key, float* value) {
  const auto& shape = workload->shape();
  const auto query_row = [](const Span& span, int head, int row) {
    return span.query + row * span.row_stride + head * span.head_stride;
  };
  const auto key_row = [](const Span& span, int head, int row) {
    return span.kv.key + KvOffset(span.kv, head, row);
  };
  const auto value_row = [](const Span& span, int head, int row) {
    return span.kv.value + KvOffset(span.kv, head, row);
  };
  Export(*workload, shape.num_heads, shape.query_rows, query_row, query);
  Export(*workload, shape.num_kv_heads, shape.kv_rows, key_row, key);
  Export(*workload, shape.num_kv_heads, shape.kv_rows, value_row, value);
}

void flashcore_bench_output(const Workload* workload, float* output) {
  const auto row_of = [](const Span& span, int head, int row) {
    return span.output + row * span.row_stride + head * span.head_stride;
  };
  Export(*workload, workload->shape().num_heads, workload->shape().query_rows, row_of, output);
}

const char* flashcore_bench_simd_target() { return CpuSimdTarget(); }

}  // extern "C"
}  // namespace flashcore::kernels
