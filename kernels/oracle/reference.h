// The oracle: attention in float64, directly from the definition in attention.h. Slow and simple;
// never used to serve.
#ifndef FLASHCORE_KERNELS_ORACLE_REFERENCE_H_
#define FLASHCORE_KERNELS_ORACLE_REFERENCE_H_

#include <limits>
#include <vector>

#include "kernels/attention.h"
#include "kernels/oracle/rows.h"

namespace flashcore::kernels {

// The LSE of a row that sees nothing.
inline constexpr double kNothing = -std::numeric_limits<double>::infinity();

// Results of one span, or of all spans of a batch, concatenated. Per span: output [query_rows,
// num_heads, head_dim] and lse [query_rows, num_heads], contiguous.
struct AttentionResult {
  std::vector<double> output;
  std::vector<double> lse;
};

// Attention of one query row of one head. Sums and exponentials are of type Real.
template <class Real>
struct RowAttention {
  std::vector<Real> scores;    // [visible rows]
  std::vector<Real> weights;   // [visible rows], the probabilities
  std::vector<double> output;  // [head_dim]; zeros if the row sees nothing
  double lse = kNothing;
  Real largest_score = 0;
};

// Float64 attention.
RowAttention<double> AttendExactly(const QueryRow& row);

// Unfused attention in `dtype`, as separate framework operators compute it: scores, probabilities
// and output are each rounded to the dtype; sums are float32.
RowAttention<float> AttendUnfused(const QueryRow& row, DType dtype);

// Both, over the inputs of `batch`; its output and lse pointers are ignored. 8-bit K/V elements are
// scale of the row * code.
AttentionResult ReferenceAttention(const AttentionBatch& batch,
                                   Visibility* visible = VisibleByMask);
AttentionResult UnfusedAttention(const AttentionBatch& batch, Visibility* visible = VisibleByMask);

// Writes `result` to the outputs of `batch`: O in its dtype, and the LSE of spans that ask for it.
void StoreResult(const AttentionResult& result, const AttentionBatch& batch);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_ORACLE_REFERENCE_H_
