// Attention on the host that rounds where a kernel does: every error bound must accept it, also of
// kernels that this machine cannot run.
#ifndef FLASHCORE_TESTS_KERNELS_ROUNDED_ATTENTION_H_
#define FLASHCORE_TESTS_KERNELS_ROUNDED_ATTENTION_H_

#include "kernels/attention.h"
#include "kernels/kernel.h"
#include "kernels/plan.h"
#include "tests/kernels/kernel_rounding.h"

namespace flashcore::kernels {

// Tiles of 64 K/V rows, online softmax, splits. Scores and P V are summed in steps of 8 and 16
// products, each rounded to the type of the sums; CUDA kernels round P to the dtype. Products of
// codes are summed exactly.
AttentionResult RoundedAttention(const KernelSpec& spec, const PlanOptions& options,
                                 const Geometry& geometry, const Span& span);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_KERNELS_ROUNDED_ATTENTION_H_
