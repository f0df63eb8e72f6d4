// The shape of a benchmark's attention problem, and the work and bytes that it stands for.
#ifndef FLASHCORE_KERNELS_BENCH_SHAPE_H_
#define FLASHCORE_KERNELS_BENCH_SHAPE_H_

#include <cstdint>

#include "kernels/attention.h"

namespace flashcore::kernels {

// Spans that are all alike.
struct AttentionShape {
  DType dtype = DType::kFloat16;
  int32_t spans = 1;
  int32_t num_heads = 8;
  int32_t num_kv_heads = 8;
  int32_t query_rows = 512;
  int32_t kv_rows = 512;
  int32_t head_dim = 64;
  Mask mask;
  KvDType kv_dtype = KvDType::kSameAsQuery;

  Geometry geometry() const { return {dtype, num_heads, num_kv_heads, head_dim, kv_dtype}; }
};

// Multiplications and additions of Q.K^T and P.V over what the mask lets the rows see.
double Flops(const AttentionShape& shape);
// Bytes of Q, and as many of O.
int64_t QueryBytes(const AttentionShape& shape);
// Bytes of K and V together, a common prefix counted for each span, without scales.
int64_t KvBytes(const AttentionShape& shape);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_BENCH_SHAPE_H_
