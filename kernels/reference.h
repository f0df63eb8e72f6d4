// The oracle: attention in float64, straight from the definition in attention.h. Slow, obvious, and
// never used to serve.
#ifndef FLASHCORE_KERNELS_REFERENCE_H_
#define FLASHCORE_KERNELS_REFERENCE_H_

#include <vector>

#include "kernels/attention.h"

namespace flashcore::kernels {

// Results of every span, one after the other, packed as NHD whatever the strides of the inputs:
// output [query_rows, num_heads, head_dim] and lse [query_rows, num_heads] per span.
struct ReferenceResult {
  std::vector<double> output;
  std::vector<double> lse;
};

// Float64 attention over the inputs of `batch` (its output and lse pointers are ignored). FP8 K/V
// count as what they stand for, scale * E4M3.
ReferenceResult ReferenceAttention(const AttentionBatch& batch);

// Unfused attention at the precision of the batch's dtype, as a chain of framework operators would
// compute it: scores, probabilities and output are each rounded to the dtype, sums are float32. FP8
// K/V are not: scale * E4M3 is taken as float32. Its error against ReferenceAttention is the
// yardstick for a kernel's.
ReferenceResult UnfusedAttention(const AttentionBatch& batch);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_REFERENCE_H_
