// The window that keeps the hot segment of the arena in the L2 cache, on a fake GPU.
#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/device/cuda_device.h"
#include "tests/device/fake_gpu.h"
#include "tests/device/fake_gpu_fixture.h"

namespace flashcore::server {
namespace {

using testing::AttendJob;
using testing::FakeGpuTest;
using ::testing::HasSubstr;
using testing::SmallOptions;

using L2Window = CudaDevice::L2Window;
constexpr size_t kMiB = size_t{1} << 20;

TEST_F(FakeGpuTest, TheWindowOfEveryLaneCoversTheHotSegment) {
  CudaDevice::Options options = SmallOptions();
  options.lanes = 3;
  const auto expect_window = [this](size_t bytes) {
    const Device& device = engine_->device();
    EXPECT_EQ(device.kv_memory().hot_bytes, bytes);
    EXPECT_EQ(device.info().l2_window_bytes, bytes);
    EXPECT_EQ(device.info().l2_note.empty(), bytes > 0);
    testing::ExpectWindows(0, device);
  };
  Start(options);
  expect_window(kMiB);
  EXPECT_EQ(engine_->device().info().l2_persisting_bytes, kMiB);
  options.l2_budget_bytes = kMiB - 1;
  Start(options);
  expect_window(kMiB / 2);
  options.l2_window = L2Window::kOff;
  Start(options);
  expect_window(0);
}

TEST_F(FakeGpuTest, AutoTakesTheWindowThatPays) {
  CudaDevice::Options options = SmallOptions();
  options.l2_window = L2Window::kAuto;
  testing::SetFakeGpuWindowedTimes(0.2f, 0.26f);
  Start(options);
  EXPECT_EQ(engine_->device().kv_memory().hot_bytes, kMiB);
  EXPECT_EQ(engine_->device().info().l2_window_bytes, kMiB);
  EXPECT_EQ(engine_->device().info().l2_persisting_bytes, kMiB);
  EXPECT_EQ(engine_->device().info().l2_note, "");
  testing::ExpectWindows(0, engine_->device());
}

TEST_F(FakeGpuTest, AutoLeavesTheL2AsItWasIfTheWindowDoesNotPay) {
  CudaDevice::Options options = SmallOptions();
  options.l2_window = L2Window::kAuto;
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  ASSERT_EQ(cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, 4096), cudaSuccess);
  testing::SetFakeGpuWindowedTimes(0.24f, 0.245f);  // differences that may be noise
  const int resets = testing::FakeGpuL2Resets(0);
  Start(options);
  EXPECT_EQ(engine_->device().kv_memory().hot_bytes, 0u);
  EXPECT_EQ(engine_->device().info().l2_window_bytes, 0u);
  testing::ExpectWindows(0, engine_->device());
  EXPECT_EQ(engine_->device().info().l2_persisting_bytes, 4096u);
  EXPECT_THAT(
      engine_->device().info().l2_note,
      HasSubstr("again took between other reads 240 us with a window, 250 us without (no gain); "
                "beside other reads 245 us with a window, 250 us without (no gain)"));
  EXPECT_EQ(testing::FakeGpuSetAsideBytes(0), 4096u);
  EXPECT_GT(testing::FakeGpuL2Resets(0), resets);
}

TEST_F(FakeGpuTest, AutoTakesNoWindowThatLosesBesideOtherReads) {
  CudaDevice::Options options = SmallOptions();
  options.l2_window = L2Window::kAuto;
  testing::SetFakeGpuWindowedTimes(0.2f, 0.28f);
  Start(options);
  EXPECT_EQ(engine_->device().info().l2_window_bytes, 0u);
  EXPECT_THAT(
      engine_->device().info().l2_note,
      HasSubstr("again took beside other reads 280 us with a window, 250 us without (a loss)"));
}

TEST_F(FakeGpuTest, AProbeThatFailsMeansNoWindow) {
  CudaDevice::Options options = SmallOptions();
  options.l2_window = L2Window::kAuto;
  testing::FailFakeGpuLaunches(cudaErrorInvalidConfiguration);
  Start(options);
  testing::FailFakeGpuLaunches(cudaSuccess);
  EXPECT_EQ(engine_->device().kv_memory().hot_bytes, 0u);
  EXPECT_THAT(engine_->device().info().l2_note, HasSubstr("the L2 probe: a fake error"));
  EXPECT_EQ(Attend(1, 1), absl::OkStatus());
  testing::FailFakeGpuLaunches(cudaErrorIllegalAddress);
  EXPECT_TRUE(IsDeviceLost(CudaDevice::Create(options).status()));
}

TEST_F(FakeGpuTest, TheL2ForgetsASequenceThatIsGone) {
  Engine::Options options;
  options.sequences.superblock_bytes = kMiB / 2;
  engine_ = std::make_unique<Engine>(options, CudaDevice::Create(SmallOptions()).value(), &clock_,
                                     &metrics_);
  const auto sequence = engine_->sequences().Create({1, 1, 64, kernels::DType::kFloat16},
                                                    {/*pin=*/true}, {"alice", {}});
  ASSERT_EQ(sequence.status(), absl::OkStatus());
  AttendJob job;
  job.operation.request = testing::MakeRequest(1, 1200);  // 19 pages of 16 KiB
  testing::FillTensors(&job, &random_);
  job.operation.request.spans[0].sequence_id = sequence->id.ToBytes();
  ASSERT_EQ(Prepare(&job, engine_.get()), absl::OkStatus());
  ASSERT_EQ(engine_->Enqueue(&job.operation), absl::OkStatus());
  ASSERT_EQ(job.ended.get(), absl::OkStatus());
  ASSERT_GE(engine_->sequences().stats().hot.used_bytes, kMiB / 4);

  const int resets = testing::FakeGpuL2Resets(0);
  ASSERT_EQ(engine_->sequences().Delete(sequence->id, {"alice", {}}), absl::OkStatus());
  EXPECT_TRUE(testing::WaitUntil([&] { return testing::FakeGpuL2Resets(0) != resets; }));
  EXPECT_EQ(testing::FakeGpuL2Resets(0), resets + 1);
}

}  // namespace
}  // namespace flashcore::server
