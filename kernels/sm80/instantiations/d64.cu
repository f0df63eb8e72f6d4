#include "kernels/sm80/attend.cuh"

namespace flashcore::kernels::sm80 {

template Launcher Attend<Arch::kLargeShared, DType::kFloat16, 64>;
template Launcher Attend<Arch::kSmallShared, DType::kFloat16, 64>;
template Launcher Attend<Arch::kLargeShared, DType::kBFloat16, 64>;
template Launcher Attend<Arch::kSmallShared, DType::kBFloat16, 64>;

}  // namespace flashcore::kernels::sm80
