#include "kernels/bench/shape.h"

#include "kernels/plan.h"

namespace flashcore::kernels {

double Flops(const AttentionShape& shape) {
  double pairs = 0;
  for (int32_t i = 0; i < shape.query_rows; ++i) {
    const KvRange seen = VisibleKv(shape.mask, shape.query_rows, shape.kv_rows, i, i + 1);
    pairs += seen.end - seen.begin;
  }
  return 4.0 * pairs * shape.head_dim * shape.num_heads * shape.spans;
}

int64_t QueryBytes(const AttentionShape& shape) {
  const int64_t row = shape.head_dim * DTypeBytes(shape.dtype);
  return row * shape.query_rows * shape.num_heads * shape.spans;
}

int64_t KvBytes(const AttentionShape& shape) {
  const int64_t row = shape.head_dim * KvElementBytes(shape.dtype, shape.kv_dtype);
  return 2 * row * shape.kv_rows * shape.num_kv_heads * shape.spans;
}

}  // namespace flashcore::kernels
