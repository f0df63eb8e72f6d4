#include "kernels/sm80/attend.cuh"

namespace flashcore::kernels::sm80 {

// One file for every precision: they share the kernels of few rows.
template Launcher Attend<Arch::kLargeShared, DType::kFloat16, 64, Accumulate::kFloat32,
                         KvDType::kInt8, Precision::k16Bit>;
template Launcher Attend<Arch::kSmallShared, DType::kFloat16, 64, Accumulate::kFloat32,
                         KvDType::kInt8, Precision::k16Bit>;
template Launcher Attend<Arch::kLargeShared, DType::kBFloat16, 64, Accumulate::kFloat32,
                         KvDType::kInt8, Precision::k16Bit>;
template Launcher Attend<Arch::kSmallShared, DType::kBFloat16, 64, Accumulate::kFloat32,
                         KvDType::kInt8, Precision::k16Bit>;
template Launcher Attend<Arch::kLargeShared, DType::kFloat16, 64, Accumulate::kFloat32,
                         KvDType::kInt8, Precision::kInt8Qk>;
template Launcher Attend<Arch::kSmallShared, DType::kFloat16, 64, Accumulate::kFloat32,
                         KvDType::kInt8, Precision::kInt8Qk>;
template Launcher Attend<Arch::kLargeShared, DType::kBFloat16, 64, Accumulate::kFloat32,
                         KvDType::kInt8, Precision::kInt8Qk>;
template Launcher Attend<Arch::kSmallShared, DType::kBFloat16, 64, Accumulate::kFloat32,
                         KvDType::kInt8, Precision::kInt8Qk>;
template Launcher Attend<Arch::kLargeShared, DType::kFloat16, 64, Accumulate::kFloat32,
                         KvDType::kInt8, Precision::kInt8QkPv>;
template Launcher Attend<Arch::kSmallShared, DType::kFloat16, 64, Accumulate::kFloat32,
                         KvDType::kInt8, Precision::kInt8QkPv>;
template Launcher Attend<Arch::kLargeShared, DType::kBFloat16, 64, Accumulate::kFloat32,
                         KvDType::kInt8, Precision::kInt8QkPv>;
template Launcher Attend<Arch::kSmallShared, DType::kBFloat16, 64, Accumulate::kFloat32,
                         KvDType::kInt8, Precision::kInt8QkPv>;

}  // namespace flashcore::kernels::sm80
