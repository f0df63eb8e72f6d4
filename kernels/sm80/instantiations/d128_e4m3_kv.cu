#include "kernels/sm80/attend.cuh"

namespace flashcore::kernels::sm80 {

constexpr KvDType kE4M3 = KvDType::kFloat8E4M3;

template Launcher Attend<Arch::kLargeShared, DType::kFloat16, 128, Accumulate::kFloat32, kE4M3>;
template Launcher Attend<Arch::kSmallShared, DType::kFloat16, 128, Accumulate::kFloat32, kE4M3>;
template Launcher Attend<Arch::kLargeShared, DType::kBFloat16, 128, Accumulate::kFloat32, kE4M3>;
template Launcher Attend<Arch::kSmallShared, DType::kBFloat16, 128, Accumulate::kFloat32, kE4M3>;

}  // namespace flashcore::kernels::sm80
