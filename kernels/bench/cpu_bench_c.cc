// A Workload behind a C interface, for compare_cpu.py.
#include "kernels/bench/cpu_workload.h"
#include "kernels/cpu/attention_cpu.h"

using flashcore::kernels::DType;
using flashcore::kernels::Mask;
using flashcore::kernels::Workload;
using flashcore::kernels::WorkloadShape;

extern "C" {

// The caller frees the result with flashcore_bench_free.
Workload* flashcore_bench_new(int bfloat16, int spans, int num_heads, int num_kv_heads,
                              int query_rows, int kv_rows, int head_dim, int causal, int threads) {
  const DType dtype = bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  const Mask mask = causal ? Mask::Causal() : Mask::None();
  return new Workload(
      {{dtype, spans, num_heads, num_kv_heads, query_rows, kv_rows, head_dim, mask}}, threads);
}

void flashcore_bench_free(Workload* workload) { delete workload; }

void flashcore_bench_run(Workload* workload) { workload->Run(); }

void flashcore_bench_inputs(const Workload* workload, float* query, float* key, float* value) {
  workload->ExportInputs(query, key, value);
}

void flashcore_bench_output(const Workload* workload, float* output) {
  workload->ExportOutput(output);
}

const char* flashcore_bench_simd_target() { return flashcore::kernels::CpuSimdTarget(); }

}  // extern "C"
