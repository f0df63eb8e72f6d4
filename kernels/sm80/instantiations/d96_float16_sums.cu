#include "kernels/sm80/attend.cuh"

namespace flashcore::kernels::sm80 {

template Launcher Attend<Arch::kLargeShared, DType::kFloat16, 96, Accumulate::kFloat16>;
template Launcher Attend<Arch::kSmallShared, DType::kFloat16, 96, Accumulate::kFloat16>;

}  // namespace flashcore::kernels::sm80
