#include "kernels/registry.h"

#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <tuple>

namespace flashcore::kernels {
namespace {

TEST(Registry, RowsAreUniqueAndComplete) {
  std::set<std::tuple<Arch, DType, KvDType, Precision, int32_t, Accumulate>> seen;
  for (const Kernel& kernel : AllKernels()) {
    const KernelSpec& spec = kernel.spec;
    EXPECT_TRUE(seen.insert({spec.arch, spec.dtype, spec.kv_dtype, spec.precision, spec.head_dim,
                             spec.accumulate})
                    .second);
    EXPECT_EQ(FindKernel(spec), &kernel);
    EXPECT_NE(kernel.launch, nullptr);
    EXPECT_GT(kernel.plan_options.tile_rows, 0);
    EXPECT_EQ(kernel.plan_options.split_kv_rows % kPageTokens, 0);
  }
}

void ExpectBothTypesAndFiveHeadDims(Arch arch, KvDType kv_dtype) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (int32_t head_dim : {32, 64, 96, 128, 256}) {
      const KernelSpec asked{arch, dtype, head_dim, Accumulate::kFloat32, kv_dtype};
      const Kernel* kernel = FindKernel(asked);
      ASSERT_NE(kernel, nullptr) << ExplainMissing(asked);
      EXPECT_EQ(kernel->spec.arch, arch);
      EXPECT_EQ(kernel->spec.dtype, dtype);
      EXPECT_EQ(kernel->spec.kv_dtype, kv_dtype);
      EXPECT_EQ(kernel->spec.head_dim, head_dim);
    }
  }
}

TEST(Registry, TheCpuHasBothTypesAndFiveHeadDims) {
  for (const KvDType kv_dtype : {KvDType::kSameAsQuery, KvDType::kFloat8E4M3, KvDType::kInt8}) {
    ExpectBothTypesAndFiveHeadDims(Arch::kCpu, kv_dtype);
  }
}

#ifdef FLASHCORE_HAVE_CUDA
TEST(Registry, Sm80HasBothTypesAndFiveHeadDims) {
  ExpectBothTypesAndFiveHeadDims(Arch::kLargeShared, KvDType::kSameAsQuery);
}

TEST(Registry, SmallSharedHasTheRowsOfLargeShared) {
  int rows = 0;
  for (const Kernel& kernel : AllKernels()) {
    KernelSpec asked = kernel.spec;
    if (asked.arch == Arch::kCpu) continue;
    rows += asked.arch == Arch::kLargeShared ? 1 : -1;
    asked.arch = Arch::kSmallShared;
    ASSERT_NE(FindKernel(asked), nullptr) << ExplainMissing(asked);
  }
  EXPECT_EQ(rows, 0);
}

TEST(Registry, Sm80SumsInFloat16ForFiveHeadDims) {
  for (int32_t head_dim : {32, 64, 96, 128, 256}) {
    const KernelSpec asked{Arch::kLargeShared, DType::kFloat16, head_dim, Accumulate::kFloat16};
    const Kernel* kernel = FindKernel(asked);
    ASSERT_NE(kernel, nullptr) << ExplainMissing(asked);
    EXPECT_EQ(kernel->spec.accumulate, Accumulate::kFloat16);
  }
}

TEST(Registry, GpusRead8BitKvOfTwoHeadDims) {
  for (const Arch arch : {Arch::kLargeShared, Arch::kSmallShared}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const KvDType kv_dtype : {KvDType::kFloat8E4M3, KvDType::kInt8}) {
        for (const int32_t head_dim : {64, 128}) {
          const KernelSpec asked{arch, dtype, head_dim, Accumulate::kFloat32, kv_dtype};
          EXPECT_NE(FindKernel(asked), nullptr) << ExplainMissing(asked);
        }
        const KernelSpec missing{arch, dtype, 96, Accumulate::kFloat32, kv_dtype};
        EXPECT_EQ(ExplainMissing(missing), "head_dim 96 is not one of 64, 128");
      }
    }
  }
}

TEST(Registry, GpusMultiplyCodesOfInt8KvOfTwoHeadDims) {
  for (const Arch arch : {Arch::kLargeShared, Arch::kSmallShared}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const Precision precision : {Precision::kInt8Qk, Precision::kInt8QkPv}) {
        for (const int32_t head_dim : {64, 128}) {
          const KernelSpec asked{arch,           dtype,    head_dim, Accumulate::kFloat32,
                                 KvDType::kInt8, precision};
          EXPECT_NE(FindKernel(asked), nullptr) << ExplainMissing(asked);
        }
      }
    }
  }
}
#endif

TEST(Registry, AGpuHasTheBestArchThatItIsEnoughFor) {
  EXPECT_EQ(ArchOf(75, 163 * 1024), std::nullopt);
  EXPECT_EQ(ArchOf(80, 163 * 1024), Arch::kLargeShared);
  EXPECT_EQ(ArchOf(90, 227 * 1024), Arch::kLargeShared);
  EXPECT_EQ(ArchOf(86, 99 * 1024), Arch::kSmallShared);
  EXPECT_EQ(ArchOf(89, 99 * 1024), Arch::kSmallShared);
}

// The tensor cores sum products of BF16 in float32 only.
TEST(Registry, Float16SumsAreForFloat16Inputs) {
  for (const Kernel& kernel : AllKernels()) {
    if (kernel.spec.accumulate == Accumulate::kFloat16) {
      EXPECT_EQ(kernel.spec.dtype, DType::kFloat16);
    }
  }
}

TEST(Registry, ExplainsTheDifference) {
  const KernelSpec head_dim{Arch::kCpu, DType::kFloat16, 80};
  EXPECT_EQ(FindKernel(head_dim), nullptr);
  EXPECT_EQ(ExplainMissing(head_dim), "head_dim 80 is not one of 32, 64, 96, 128, 256");

  const KernelSpec accumulate{Arch::kCpu, DType::kFloat16, 64, Accumulate::kFloat16};
  EXPECT_EQ(FindKernel(accumulate), nullptr);
  EXPECT_EQ(ExplainMissing(accumulate), "accumulate float16 is not float32");

  const KernelSpec precision{Arch::kCpu,           DType::kFloat16, 64,
                             Accumulate::kFloat32, KvDType::kInt8,  Precision::kInt8Qk};
  EXPECT_EQ(FindKernel(precision), nullptr);
  EXPECT_EQ(ExplainMissing(precision), "precision int8_qk is not 16bit");
}

TEST(Registry, Names) {
  EXPECT_STREQ(Name(Arch::kCpu), "cpu");
  EXPECT_STREQ(Name(Arch::kLargeShared), "sm80");
  EXPECT_STREQ(Name(Arch::kSmallShared), "sm89");
  EXPECT_STREQ(Name(DType::kBFloat16), "bfloat16");
  EXPECT_STREQ(Name(KvDType::kSameAsQuery), "same_as_query");
  EXPECT_STREQ(Name(KvDType::kFloat8E4M3), "float8_e4m3");
  EXPECT_STREQ(Name(KvDType::kInt8), "int8");
  EXPECT_STREQ(Name(Accumulate::kFloat32), "float32");
  EXPECT_STREQ(Name(Precision::k16Bit), "16bit");
  EXPECT_STREQ(Name(Precision::kInt8Qk), "int8_qk");
  EXPECT_STREQ(Name(Precision::kInt8QkPv), "int8_qk_pv");
}

}  // namespace
}  // namespace flashcore::kernels
