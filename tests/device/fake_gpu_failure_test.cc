// Failed calls of the CUDA runtime, and the loss of the GPU, on a fake GPU.
#include <cstring>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/device/cuda_device.h"
#include "tests/device/fake_gpu.h"
#include "tests/device/fake_gpu_fixture.h"

namespace flashcore::server {
namespace {

using testing::AttendJob;
using ::testing::ElementsAre;
using testing::FakeGpuTest;
using testing::SmallOptions;

TEST_F(FakeGpuTest, AFailedLaunchFailsItsRequestsOnly) {
  Start(SmallOptions());
  testing::FailFakeGpuLaunches(cudaErrorInvalidConfiguration);
  absl::Status status = Attend(1, 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(IsDeviceLost(status));
  testing::FailFakeGpuLaunches(cudaSuccess);
  EXPECT_EQ(Attend(1, 1), absl::OkStatus());
}

// When a request has ended, its staging memory serves others.
TEST_F(FakeGpuTest, AFailedLaunchEndsAfterItsCopies) {
  CudaDevice::Options options = SmallOptions();
  options.direct_io_bytes = 0;
  Start(options);
  testing::HoldFakeGpu(0, true);
  testing::FailFakeGpuLaunches(cudaErrorInvalidConfiguration);
  AttendJob job;
  job.operation.request = testing::MakeRequest(1, 100);
  Submit(&job);
  const size_t used_bytes = engine_->staging().used_bytes();
  EXPECT_TRUE(
      testing::WaitUntil([&] { return testing::HasEnded(job) || testing::FakeGpuWaiters() > 0; }));
  EXPECT_FALSE(testing::HasEnded(job)) << "the copies of its inputs are under way";
  EXPECT_GT(testing::FakeGpuWaitingPieces(0), 0);
  EXPECT_EQ(engine_->staging().used_bytes(), used_bytes);
  testing::HoldFakeGpu(0, false);
  EXPECT_EQ(job.ended.get().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(testing::FakeGpuWaitingPieces(0), 0);
  EXPECT_LT(engine_->staging().used_bytes(), used_bytes);
}

TEST_F(FakeGpuTest, AFailureInALaterPassLeavesNothingUnderWay) {
  CudaDevice::Options options = SmallOptions();
  options.list_bytes = 2048;
  options.direct_io_bytes = 0;
  Start(options);
  testing::FailFakeGpuLaunches(cudaErrorInvalidConfiguration, /*successes=*/2);
  AttendJob job;
  job.operation.request = testing::MakeRequest();
  testing::SetSpans(std::vector<SpanShape>(400, {1, 2, "", {}}), &job.operation.request);
  EXPECT_EQ(Attend(&job).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(testing::FakeGpuWaitingPieces(0), 0);
}

TEST_F(FakeGpuTest, AFailedCopyLeavesNothingUnderWay) {
  CudaDevice::Options options = SmallOptions();
  options.direct_io_bytes = 0;
  Start(options);
  for (const int successes : {0, 1}) {  // copies of inputs and results
    const int copies = testing::FakeGpuCopies();
    testing::FailFakeGpuCopies(cudaErrorInvalidValue, successes);
    EXPECT_EQ(Attend(1, 100).code(), absl::StatusCode::kInternal);
    EXPECT_EQ(testing::FakeGpuCopies() - copies, successes);
    EXPECT_EQ(testing::FakeGpuWaitingPieces(0), 0);
  }
  testing::FailFakeGpuCopies(cudaSuccess);
  EXPECT_EQ(Attend(1, 100), absl::OkStatus());
}

TEST_F(FakeGpuTest, AFailedPageCopyLeavesNothingUnderWay) {
  CudaDevice::Options options = SmallOptions();
  options.list_bytes = 2048;
  const auto device = CudaDevice::Create(options).value();
  constexpr size_t kPageBytes = 1024;
  std::byte* const base = device->kv_memory().base;
  std::memset(base, 7, kPageBytes);
  const std::vector<kernels::PageCopy> copies(100, {base, base + kPageBytes});
  testing::FailFakeGpuLaunches(cudaErrorInvalidConfiguration);
  for (int i = 0; i < 3; ++i) {  // each leaves the list empty: together they would overflow it
    EXPECT_EQ(device->CopyPages(0, kPageBytes, copies).code(), absl::StatusCode::kInternal);
    EXPECT_EQ(testing::FakeGpuWaitingPieces(0), 0);
  }
  testing::FailFakeGpuLaunches(cudaSuccess);
  EXPECT_EQ(device->CopyPages(0, kPageBytes, copies), absl::OkStatus());
  EXPECT_EQ(std::memcmp(base, base + kPageBytes, kPageBytes), 0);
}

TEST_F(FakeGpuTest, ALostDeviceIsToldOnceAndTakesNoMoreRequests) {
  Start(SmallOptions());
  testing::FailFakeGpuLaunches(cudaErrorIllegalAddress);
  AttendJob first, second;
  for (AttendJob* job : {&first, &second}) {
    job->operation.request = testing::MakeRequest(1, 1);
    testing::FillTensors(job, &random_);
    ASSERT_EQ(Prepare(job, engine_.get()), absl::OkStatus());
  }
  ASSERT_EQ(engine_->Enqueue(&first.operation), absl::OkStatus());
  const bool queued = engine_->Enqueue(&second.operation).ok();
  EXPECT_TRUE(IsDeviceLost(first.ended.get()));
  if (queued) {
    EXPECT_TRUE(IsDeviceLost(second.ended.get()));
  }
  EXPECT_EQ(Attend(1, 1).code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(lost_, ElementsAre("cuda:0"));
}

// The loss shows when the lane waits for its launch.
TEST_F(FakeGpuTest, AGpuThatIsLostDuringALaunchFailsIt) {
  Start(SmallOptions());
  lost_.clear();
  testing::HoldFakeGpu(0, true);
  const int polls = testing::FakeGpuPolls();
  AttendJob job;
  job.operation.request = testing::MakeRequest(1, 100);
  Submit(&job);
  EXPECT_TRUE(testing::WaitUntil([&] { return testing::FakeGpuPolls() > polls; }));
  EXPECT_FALSE(testing::HasEnded(job));
  testing::LoseFakeGpu(0, cudaErrorLaunchFailure);
  EXPECT_TRUE(IsDeviceLost(job.ended.get()));
  EXPECT_THAT(lost_, ElementsAre("cuda:0"));
  EXPECT_EQ(testing::FakeGpuWaitingPieces(0), 0);
  EXPECT_EQ(Attend(1, 1).code(), absl::StatusCode::kUnavailable);
  testing::RestoreFakeGpus();
}

}  // namespace
}  // namespace flashcore::server
