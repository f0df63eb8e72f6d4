#include "server/device/cpu_device.h"

#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

TEST(CpuDeviceOptionsTest, SumsInFloat32Only) {
  const SteadyClock clock;
  CpuDevice::Options options;
  const auto device = CpuDevice::Create(options, &clock);
  ASSERT_EQ(device.status(), absl::OkStatus());
  for (const kernels::Kernel* kernel : (*device)->kernels()) {
    EXPECT_EQ(kernel->spec.accumulate, kernels::Accumulate::kFloat32);
  }
  options.accumulate = kernels::Accumulate::kFloat16;
  EXPECT_EQ(CpuDevice::Create(options, &clock).status(),
            absl::UnimplementedError("no kernels for cpu: accumulate float16 is not float32"));
}

}  // namespace
}  // namespace flashcore::server
