#include "kernels/sm80/attend.cuh"

namespace flashcore::kernels::sm80 {

template Launcher Attend<Arch::kSm80, DType::kFloat16, 128, Accumulate::kFloat32, KvDType::kInt8>;
template Launcher Attend<Arch::kSm89, DType::kFloat16, 128, Accumulate::kFloat32, KvDType::kInt8>;
template Launcher Attend<Arch::kSm80, DType::kBFloat16, 128, Accumulate::kFloat32, KvDType::kInt8>;
template Launcher Attend<Arch::kSm89, DType::kBFloat16, 128, Accumulate::kFloat32, KvDType::kInt8>;

}  // namespace flashcore::kernels::sm80
