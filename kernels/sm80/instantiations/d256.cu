#include "kernels/sm80/attend.cuh"

namespace flashcore::kernels::sm80 {

template Launcher Attend<Arch::kSm80, DType::kFloat16, 256>;
template Launcher Attend<Arch::kSm89, DType::kFloat16, 256>;
template Launcher Attend<Arch::kSm80, DType::kBFloat16, 256>;
template Launcher Attend<Arch::kSm89, DType::kBFloat16, 256>;

}  // namespace flashcore::kernels::sm80
