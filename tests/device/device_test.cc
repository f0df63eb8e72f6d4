#include "server/device/device.h"

#include <list>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/fakes.h"

namespace flashcore::server {
namespace {

using kernels::Accumulate;
using kernels::Arch;
using kernels::DType;
using kernels::KvDType;
using kernels::Precision;
using ::testing::ElementsAre;

// Has the kernels that the test adds.
class KernelsDevice final : public testing::HeapDevice {
 public:
  KernelsDevice() : HeapDevice(Options()) {}

  void Add(DType dtype, int32_t head_dim, KvDType kv_dtype = KvDType::kSameAsQuery,
           Precision precision = Precision::k16Bit) {
    kernels::Kernel& kernel = rows_.emplace_back();
    kernel.spec = {Arch::kCpu, dtype, head_dim, Accumulate::kFloat32, kv_dtype, precision};
    kernels_.push_back(&kernel);
  }

  const std::vector<const kernels::Kernel*>& kernels() const override { return kernels_; }
  absl::Status Dispatch(int /*lane*/, const Launch& /*launch*/) override {
    return absl::OkStatus();
  }

 private:
  std::list<kernels::Kernel> rows_;
  std::vector<const kernels::Kernel*> kernels_;
};

TEST(DeviceTest, HeadDimsAreThoseOfEveryDTypeItHas) {
  KernelsDevice device;
  device.Add(DType::kFloat16, 128);
  device.Add(DType::kFloat16, 64);
  EXPECT_THAT(SupportedDTypes(device), ElementsAre(DType::kFloat16));
  EXPECT_THAT(SupportedHeadDims(device, KvDType::kSameAsQuery), ElementsAre(64, 128));
  device.Add(DType::kBFloat16, 128);
  EXPECT_THAT(SupportedDTypes(device), ElementsAre(DType::kFloat16, DType::kBFloat16));
  EXPECT_THAT(SupportedHeadDims(device, KvDType::kSameAsQuery), ElementsAre(128));
}

TEST(DeviceTest, HeadDimsOf8BitKvAreThoseOfEveryDTypeItHas) {
  KernelsDevice device;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const int32_t head_dim : {64, 128}) device.Add(dtype, head_dim);
  }
  device.Add(DType::kFloat16, 64, KvDType::kInt8);
  device.Add(DType::kFloat16, 128, KvDType::kInt8);
  EXPECT_THAT(SupportedHeadDims(device, KvDType::kInt8), ElementsAre());
  device.Add(DType::kBFloat16, 128, KvDType::kInt8);
  EXPECT_THAT(SupportedHeadDims(device, KvDType::kInt8), ElementsAre(128));
  EXPECT_THAT(SupportedHeadDims(device, KvDType::kFloat8E4M3), ElementsAre());
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    device.Add(dtype, 64, KvDType::kFloat8E4M3);
  }
  EXPECT_THAT(SupportedHeadDims(device, KvDType::kFloat8E4M3), ElementsAre(64));
}

TEST(DeviceTest, HasTheKernelForAGeometryOrSaysThatItHasNone) {
  KernelsDevice device;
  device.Add(DType::kFloat16, 64);
  device.Add(DType::kBFloat16, 64);
  kernels::Geometry geometry{DType::kBFloat16, 4, 2, 64};
  ASSERT_EQ(device.KernelFor(geometry).status(), absl::OkStatus());
  EXPECT_EQ(*device.KernelFor(geometry), device.kernels()[1]);
  geometry.head_dim = 128;
  EXPECT_EQ(device.KernelFor(geometry).status(),
            absl::UnimplementedError(
                "fake has no kernel for bfloat16 of head_dim 128 over K/V same_as_query"));
}

TEST(DeviceTest, TheKernelHasThePrecisionThatARequestAcceptsOrMore) {
  KernelsDevice device;
  for (const KvDType kv_dtype : {KvDType::kSameAsQuery, KvDType::kInt8}) {
    device.Add(DType::kFloat16, 64, kv_dtype);
  }
  const auto precision_for = [&](Precision precision) {
    const kernels::Geometry geometry{DType::kFloat16, 4, 2, 64, KvDType::kInt8, precision};
    const auto kernel = device.KernelFor(geometry);
    EXPECT_EQ(kernel.status(), absl::OkStatus());
    EXPECT_EQ((*kernel)->spec.kv_dtype, KvDType::kInt8);
    return (*kernel)->spec.precision;
  };
  constexpr Precision kAll[] = {Precision::k16Bit, Precision::kInt8Qk, Precision::kInt8QkPv};
  for (const Precision precision : kAll) EXPECT_EQ(precision_for(precision), Precision::k16Bit);
  for (const Precision precision : {Precision::kInt8QkPv, Precision::kInt8Qk}) {
    device.Add(DType::kFloat16, 128, KvDType::kInt8, precision);
    device.Add(DType::kBFloat16, 64, KvDType::kInt8, precision);
    EXPECT_EQ(precision_for(precision), Precision::k16Bit) << "of another shape";
    device.Add(DType::kFloat16, 64, KvDType::kInt8, precision);
  }
  for (const Precision precision : kAll) EXPECT_EQ(precision_for(precision), precision);
  // Rows of other precision do not make K/V of a head_dim complete.
  EXPECT_THAT(SupportedHeadDims(device, KvDType::kInt8), ElementsAre());
}

TEST(DeviceTest, ChoosesKernelsByArchAndAccumulate) {
  const auto chosen = ChooseKernels(Arch::kCpu, Accumulate::kFloat32);
  ASSERT_EQ(chosen.status(), absl::OkStatus());
  EXPECT_EQ(chosen->size(), 30);
  for (const kernels::Kernel* kernel : *chosen) EXPECT_EQ(kernel->spec.arch, Arch::kCpu);
  EXPECT_EQ(ChooseKernels(Arch::kCpu, Accumulate::kFloat16).status(),
            absl::UnimplementedError("no kernels for cpu: accumulate float16 is not float32"));
}

}  // namespace
}  // namespace flashcore::server
