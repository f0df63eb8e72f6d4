#include "server/device/open_device.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

using Kind = DeviceOptions::Kind;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// No machine has so many GPUs.
constexpr int kNoSuchGpu = 1000;

class OpenDeviceTest : public ::testing::Test {
 protected:
  absl::StatusOr<OpenedDevices> Open(Kind kind) {
    DeviceOptions options;
    options.kind = kind;
    options.cpu.threads = 1;
    options.cuda[0].ordinal = kNoSuchGpu;
    return OpenDevices(options, &clock_);
  }

  SteadyClock clock_;
};

TEST_F(OpenDeviceTest, TakesTheCpuIfAskedTo) {
  const auto opened = Open(Kind::kCpu);
  ASSERT_EQ(opened.status(), absl::OkStatus());
  ASSERT_EQ(opened->devices.size(), 1u);
  EXPECT_EQ(opened->devices[0]->info().id, "cpu");
  EXPECT_EQ(opened->reason, "--device=cpu");
}

TEST_F(OpenDeviceTest, AutoTakesTheCpuForWantOfAGpuAndSaysWhy) {
  const auto opened = Open(Kind::kAuto);
  ASSERT_EQ(opened.status(), absl::OkStatus());
  ASSERT_EQ(opened->devices.size(), 1u);
  EXPECT_EQ(opened->devices[0]->info().id, "cpu");
  EXPECT_THAT(opened->reason, StartsWith("--device=auto: "));
  EXPECT_GT(opened->reason.size(), sizeof("--device=auto: "));
}

TEST_F(OpenDeviceTest, AGpuByNameIsNotReplacedByTheCpu) {
  const absl::Status status = Open(Kind::kCuda).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_THAT(status.message(), HasSubstr("cuda:1000: "));
}

}  // namespace
}  // namespace flashcore::server
