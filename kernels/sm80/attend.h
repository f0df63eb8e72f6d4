// Fused attention for Ampere and Ada (sm_80 to sm_89), and through PTX for later architectures.
#ifndef FLASHCORE_KERNELS_SM80_ATTEND_H_
#define FLASHCORE_KERNELS_SM80_ATTEND_H_

#include "kernels/attention.h"
#include "kernels/kernel.h"
#include "kernels/plan.h"

namespace flashcore::kernels::sm80 {

// The Launcher of the registry's row with these values; instantiations/ has each. Every pointer and
// stride of the spans must be a multiple of 16 bytes (LSE: 4). Float16 sums need
// dtype float16; 8-bit K/V needs float32 sums and a head_dim of 64 or 128, less precise products
// INT8 K/V. Tiles of up to 16 rows have 16-bit products in any case. The last block of a
// tile of up to 16 rows to finish combines its KV splits; another kernel combines those of more.
//
// With float16 sums, FP16 only: mma.sync has no float16 accumulators for BF16. Limits of a row:
// - q.k, before softmax_scale: above 65504 it is infinite, and O and LSE become NaN; below -65504
//   the token counts as masked. It is rounded to 11 bits after every 16 components; that error
//   times softmax_scale is the relative error of a probability.
// - P V: probabilities are relative to the largest score, so P V is at most n * max|V|, where n is
//   the row's sum of probabilities, at most its number of visible tokens. O beyond 65504 is
//   infinite or NaN. P V is rounded to 11 bits after every 16 tokens: if V has one sign and
//   attention is even, tokens beyond some ten thousand no longer count.
template <Arch kArch, DType kDType, int kHeadDim, Accumulate kAccumulate = Accumulate::kFloat32,
          KvDType kKvDType = KvDType::kSameAsQuery, Precision kPrecision = Precision::k16Bit>
int Attend(const AttentionBatch& batch, const Plan& plan, const LaunchContext& ctx);

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_ATTEND_H_
