// Fused attention for Ampere and Ada (sm_80 to sm_89), and through PTX for later architectures.
#ifndef FLASHCORE_KERNELS_SM80_ATTENTION_SM80_H_
#define FLASHCORE_KERNELS_SM80_ATTENTION_SM80_H_

#include "kernels/attention.h"
#include "kernels/plan.h"
#include "kernels/registry.h"

namespace flashcore::kernels {

// Launcher of the sm80 and sm89 rows of the registry: head_dim 32, 64, 96, 128 or 256, both dtypes;
// FP8 K/V with float16 queries, head_dim 64 or 128. Launches a kernel for each tile size in the
// plan, side by side: one for a batch of decodes, at most four. The last block of a tile of up to
// 16 rows to finish combines its KV splits; another kernel combines those of more. Every pointer
// and stride of the spans must be a multiple of 16 bytes (LSE: 4). The plan must not share items
// between spans.
//
// With float16 sums, FP16 only: mma.sync has no float16 accumulators for BF16. Limits of a row:
// - q.k, before softmax_scale: above 65504 it is infinite, and O and LSE become NaN; below -65504
//   the token counts as masked. It is rounded to 11 bits after every 16 components; that error
//   times softmax_scale is the relative error of a probability.
// - P V: probabilities are relative to the largest score, so P V is at most n * max|V|, where n is
//   the row's sum of probabilities, at most its number of visible tokens. O beyond 65504 is
//   infinite or NaN. P V is rounded to 11 bits after every 16 tokens: if V has one sign and
//   attention is even, tokens beyond some ten thousand no longer count.
int LaunchAttentionSm80(const KernelSpec& spec, const AttentionBatch& batch, const Plan& plan,
                        const LaunchContext& ctx);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SM80_ATTENTION_SM80_H_
