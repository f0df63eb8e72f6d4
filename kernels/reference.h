// The oracle: attention in float64, directly from the definition in attention.h. Slow and simple;
// never used to serve.
#ifndef FLASHCORE_KERNELS_REFERENCE_H_
#define FLASHCORE_KERNELS_REFERENCE_H_

#include <vector>

#include "kernels/attention.h"

namespace flashcore::kernels {

// Results of all spans, concatenated. Per span: output [query_rows, num_heads, head_dim] and lse
// [query_rows, num_heads], contiguous.
struct ReferenceResult {
  std::vector<double> output;
  std::vector<double> lse;
};

// Float64 attention over the inputs of `batch`; its output and lse pointers are ignored. 8-bit K/V
// elements are scale of the row * code.
ReferenceResult ReferenceAttention(const AttentionBatch& batch);

// Unfused attention in the batch's dtype, as separate framework operators compute it: scores,
// probabilities and output are each rounded to the dtype; sums are float32. 8-bit K/V
// elements are read as above. A kernel's error bound is relative to this error.
ReferenceResult UnfusedAttention(const AttentionBatch& batch);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_REFERENCE_H_
