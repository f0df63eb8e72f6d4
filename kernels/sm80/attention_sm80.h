// Fused attention for Ampere and Ada (sm_80 to sm_89), and through PTX for what came after.
#ifndef FLASHCORE_KERNELS_SM80_ATTENTION_SM80_H_
#define FLASHCORE_KERNELS_SM80_ATTENTION_SM80_H_

#include "kernels/attention.h"
#include "kernels/plan.h"
#include "kernels/registry.h"

namespace flashcore::kernels {

// The Launcher of the sm80 rows of the registry that sum in float32: head_dim 32, 64, 96, 128 or
// 256, both dtypes; FP8 K/V with float16 queries, head_dim 64 or 128. Enqueues one kernel per tile
// size that the plan uses: one for a batch of decodes, never more than four. Splits are combined by
// the block that finishes last among a tile's. Every pointer and stride of the spans must be a
// multiple of 16 bytes (LSE: of 4); the plan must have no shared items.
int LaunchAttentionSm80(const AttentionBatch& batch, const Plan& plan, const LaunchContext& ctx);

// The same for those that sum Q K^T and P V in float16: FP16 only, because mma.sync sums products
// of BF16 in float32 only. What a row must keep to:
// - A q.k, before softmax_scale, beyond 65504 is infinite: O and LSE become NaN. Below -65504 it
//   counts as masked. It is rounded to 11 bits every 16 components, and the error times
//   softmax_scale is the relative error of a probability.
// - P V is summed relative to the largest score, so it is at most n * max|V|, where n is the row's
//   sum of probabilities, at most the number of tokens that it sees; O beyond 65504 is infinite or
//   NaN. It is rounded to 11 bits every 16 tokens: where V has one sign and attention is spread
//   evenly, tokens stop to count long before that, from some ten thousands on.
int LaunchAttentionSm80Float16(const AttentionBatch& batch, const Plan& plan,
                               const LaunchContext& ctx);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SM80_ATTENTION_SM80_H_
