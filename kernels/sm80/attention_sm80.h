// Fused attention for Ampere and Ada (sm_80 to sm_89), and through PTX for what came after.
#ifndef FLASHCORE_KERNELS_SM80_ATTENTION_SM80_H_
#define FLASHCORE_KERNELS_SM80_ATTENTION_SM80_H_

#include "kernels/attention.h"
#include "kernels/plan.h"
#include "kernels/registry.h"

namespace flashcore::kernels {

// The Launcher of every sm80 row of the registry: head_dim 32, 64, 96, 128 or 256, both dtypes,
// float32 accumulation. Enqueues one kernel per tile size that the plan uses, and one to combine
// splits if there are any: never more than four. Every pointer and stride of the spans must be a
// multiple of 16 bytes (LSE: of 4); the plan must have no shared items.
int LaunchAttentionSm80(const AttentionBatch& batch, const Plan& plan, const LaunchContext& ctx);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SM80_ATTENTION_SM80_H_
