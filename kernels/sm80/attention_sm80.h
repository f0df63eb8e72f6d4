// Fused attention for Ampere and Ada (sm_80 to sm_89), and through PTX for what came after.
#ifndef FLASHCORE_KERNELS_SM80_ATTENTION_SM80_H_
#define FLASHCORE_KERNELS_SM80_ATTENTION_SM80_H_

#include "kernels/attention.h"
#include "kernels/plan.h"
#include "kernels/registry.h"

namespace flashcore::kernels {

// The Launcher of the sm80 rows of the registry that sum in float32: head_dim 32, 64, 96, 128 or
// 256, both dtypes. Enqueues one kernel per tile size that the plan uses, and one to combine
// splits if there are any: never more than four. Every pointer and stride of the spans must be a
// multiple of 16 bytes (LSE: of 4); the plan must have no shared items.
int LaunchAttentionSm80(const AttentionBatch& batch, const Plan& plan, const LaunchContext& ctx);

// The same for those that sum Q K^T and P V in float16; float16 only, because mma.sync sums
// products of BF16 in float32 only. A softmax_scale is not applied before a score is summed, so
// these are the limits of a row:
// - a q.k beyond 65504 makes O and LSE NaN; one below -65504 counts as masked;
// - a q.k is off by up to about 2^-11 of its largest partial sum, and a probability by
// softmax_scale
//   times that, relatively: scores of magnitude 40 are good for the error bound of 2e-2;
// - P V is summed relative to the largest score, so with |V| <= v and n tokens that have about
//   the largest score it reaches n * v, beyond 65504 infinite. Before that, a sum of magnitude s
//   takes in steps of s * 2^-11 at most every 16 tokens: n up to a few thousand is exact enough.
int LaunchAttentionSm80Float16(const AttentionBatch& batch, const Plan& plan,
                               const LaunchContext& ctx);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SM80_ATTENTION_SM80_H_
