#include "client/cli/workload.h"

namespace flashcore::cli {

double AttentionFlop(const AttendRequest& shape, uint64_t query_rows, uint64_t kv_rows) {
  const auto n = static_cast<double>(query_rows);
  const auto m = static_cast<double>(kv_rows);
  // Causal: row i of n sees i + m - n + 1 of m rows, which leaves out n (n - 1) / 2 pairs; if
  // m < n, the first n - m rows see nothing and it is m (m + 1) / 2 pairs.
  double pairs = n * m;
  if (shape.mask.kind == Mask::Kind::kCausal) {
    pairs = n <= m ? n * m - n * (n - 1) / 2 : m * (m + 1) / 2;
  }
  return 4 * pairs * shape.num_heads * shape.head_dim;
}

}  // namespace flashcore::cli
