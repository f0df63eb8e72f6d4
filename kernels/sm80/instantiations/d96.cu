#include "kernels/sm80/attend.cuh"

namespace flashcore::kernels::sm80 {

template Launcher Attend<Arch::kLargeShared, DType::kFloat16, 96>;
template Launcher Attend<Arch::kSmallShared, DType::kFloat16, 96>;
template Launcher Attend<Arch::kLargeShared, DType::kBFloat16, 96>;
template Launcher Attend<Arch::kSmallShared, DType::kBFloat16, 96>;

}  // namespace flashcore::kernels::sm80
