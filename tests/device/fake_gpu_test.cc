// What the CUDA device asks of the driver, on a fake GPU. real_device_test.cc and
// sequences_property_test.cc, linked with the same fake, check its results.
#include "tests/device/fake_gpu.h"

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/device/cuda_device.h"
#include "server/device/open_device.h"
#include "server/memory/shared_memory.h"
#include "tests/engine/attend_job.h"
#include "tests/engine/fakes.h"
#include "tests/memory/test_segment.h"

namespace flashcore::server {
namespace {

using testing::AttendJob;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::SmallOptions;

using L2Window = CudaDevice::L2Window;
constexpr size_t kMiB = size_t{1} << 20;

class FakeGpuTest : public ::testing::Test {
 protected:
  void Start(const CudaDevice::Options& options) {
    Engine::Options engine_options;
    engine_options.on_device_lost = [this](const DeviceInfo& device, const absl::Status&) {
      lost_.push_back(device.id);
    };
    engine_ = std::make_unique<Engine>(engine_options, CudaDevice::Create(options).value(), &clock_,
                                       &metrics_);
  }
  ~FakeGpuTest() override {
    testing::FailFakeGpuLaunches(cudaSuccess);
    testing::SetFakeGpuWindowedTimes(0.25f, 0.25f);
  }

  absl::Status Attend(uint32_t query_rows, uint32_t kv_rows) {
    AttendJob job;
    job.operation.request = testing::MakeRequest(query_rows, kv_rows);
    return Attend(&job);
  }

  // Fills the tensors of `job`, whose request is set.
  absl::Status Attend(AttendJob* job) {
    testing::FillTensors(job, &random_);
    if (absl::Status status = Prepare(job, engine_.get()); !status.ok()) return status;
    if (absl::Status status = engine_->Enqueue(&job->operation); !status.ok()) return status;
    absl::Status status = job->ended.get();
    times_ = job->operation.times;
    return status;
  }

  // Appends `rows` to the sequence, and attends with one query row.
  absl::Status Append(SequenceId id, uint32_t layer, uint32_t rows) {
    AttendJob job;
    job.operation.request = testing::MakeRequest(1, rows);
    job.operation.request.layer = layer;
    job.operation.request.spans[0].sequence_id = id.ToBytes();
    return Attend(&job);
  }

  SteadyClock clock_;
  MetricRegistry registry_;
  DeviceMetrics metrics_{"fake", &registry_};
  std::vector<std::string> lost_;  // device ids; outlives the engine, whose lanes add to it
  std::unique_ptr<Engine> engine_;
  std::mt19937 random_{20261121};
  PhaseTimes times_;
};

TEST_F(FakeGpuTest, TimesAreTheEvents) {
  Start(SmallOptions());
  ASSERT_EQ(Attend(1, 1), absl::OkStatus());
  EXPECT_EQ(times_.copy_in, std::chrono::microseconds(250));
  EXPECT_EQ(times_.kernel, std::chrono::microseconds(250));
  EXPECT_EQ(times_.copy_out, std::chrono::microseconds(250));
}

TEST_F(FakeGpuTest, TimesAreSumsOverThePasses) {
  CudaDevice::Options options = SmallOptions();
  options.list_bytes = 2048;
  Start(options);
  AttendJob job;
  job.operation.request = testing::MakeRequest();
  testing::SetSpans(std::vector<SpanShape>(40, {1, 30, "", {}}), &job.operation.request);
  ASSERT_EQ(Attend(&job), absl::OkStatus());
  const Nanoseconds pass = std::chrono::microseconds(250);
  EXPECT_GE(times_.kernel, 4 * pass) << "2 KiB list few spans";
  EXPECT_EQ(times_.kernel % pass, Nanoseconds(0));
  EXPECT_EQ(times_.copy_in, times_.kernel);
  EXPECT_EQ(times_.copy_out, times_.kernel);
}

TEST_F(FakeGpuTest, CopiesMorePagesThanOneListHolds) {
  CudaDevice::Options options = SmallOptions();
  options.list_bytes = 2048;
  const auto device = CudaDevice::Create(options).value();
  constexpr int kPages = 300;  // a list holds 128
  constexpr size_t kPageBytes = 1024;
  std::byte* const base = device->kv_memory().base;
  std::vector<kernels::PageCopy> copies;
  for (int i = 0; i < kPages; ++i) {
    std::byte* const from = base + i * kPageBytes;
    std::memset(from, i % 251, kPageBytes);
    copies.push_back({from, from + kPages * kPageBytes});
  }
  ASSERT_EQ(device->CopyPages(0, kPageBytes, copies), absl::OkStatus());
  EXPECT_EQ(std::memcmp(base, base + kPages * kPageBytes, kPages * kPageBytes), 0);
}

TEST_F(FakeGpuTest, WaitsAsItIsTold) {
  CudaDevice::Options options = SmallOptions();
  for (const WaitStrategy wait :
       {WaitStrategy::kSpin, WaitStrategy::kYield, WaitStrategy::kBlock}) {
    options.wait = wait;
    Start(options);
    const int polls = testing::FakeGpuPolls();
    EXPECT_EQ(Attend(1, 100), absl::OkStatus());
    EXPECT_EQ(testing::FakeGpuPolls() > polls, wait != WaitStrategy::kBlock);
  }
}

// Counts the copies of inputs, results and lists.
TEST_F(FakeGpuTest, CopiesNothingThatIsSmallAndReadOnce) {
  CudaDevice::Options options = SmallOptions();
  const auto copies_of = [&](uint32_t query_rows, uint32_t kv_rows) {
    const int copies = testing::FakeGpuCopies();
    EXPECT_EQ(Attend(query_rows, kv_rows), absl::OkStatus());
    return testing::FakeGpuCopies() - copies;
  };
  options.direct_io_bytes = 0;
  Start(options);
  EXPECT_EQ(copies_of(1, 1), 3);
  options.direct_io_bytes = 256 * 1024;
  Start(options);
  EXPECT_EQ(copies_of(1, 900), 1);
  EXPECT_EQ(copies_of(16, 900), 1);
  EXPECT_EQ(copies_of(17, 900), 3) << "17 rows of 2 heads may be two tiles, which both read K/V";
  EXPECT_EQ(copies_of(1, 1100), 3) << "more than 256 KiB";
}

TEST_F(FakeGpuTest, SendsTheListsOfAnAppendAndOfTheAttentionInOneCopy) {
  Start(SmallOptions());
  const auto sequence =
      engine_->sequences().Create({1, 1, 64, kernels::DType::kFloat16}, false, "alice");
  ASSERT_EQ(sequence.status(), absl::OkStatus());
  ASSERT_EQ(Append(sequence->id, 0, 300), absl::OkStatus());
  const int copies = testing::FakeGpuCopies();
  ASSERT_EQ(Append(sequence->id, 0, 1), absl::OkStatus());
  EXPECT_EQ(testing::FakeGpuCopies() - copies, 1);
}

// Kernels can reach pinned memory. Tensors in other memory are copied, however small.
TEST_F(FakeGpuTest, ReadsAndWritesSharedMemory) {
  CudaDevice::Options options = SmallOptions();
  for (const auto& [direct_io_bytes, is_pinned, copies] :
       {std::tuple(0, true, 6), std::tuple(1 << 20, true, 1), std::tuple(1 << 20, false, 6)}) {
    options.direct_io_bytes = static_cast<size_t>(direct_io_bytes);
    Start(options);
    Gauge bytes, regions;
    SharedMemory memory({}, &engine_->device(), &bytes, &regions);
    const testing::TestSegment segment(size_t{256} << 10);
    const std::string id =
        memory.Register(SharedSegment::Open(segment.name(), segment.bytes(), false).value(), "a")
            .value();
    std::shared_ptr<const SharedRegion> region = memory.Find(id).value();
    EXPECT_TRUE(region->in_reach());
    if (!is_pinned) region = segment.Map();

    AttendJob job;
    AttendRequest& request = job.operation.request;
    request = testing::MakeRequest(5, 100);
    request.return_lse = true;
    for (int i = 0; i < kNumTensors; ++i) request.ranges[i] = {region, 16 + 32768u * i};
    testing::FillTensors(&job, &random_);
    const int before = testing::FakeGpuCopies();
    ASSERT_EQ(Prepare(&job, engine_.get()), absl::OkStatus());
    EXPECT_EQ(engine_->staging().used_bytes(), 0u);
    ASSERT_EQ(engine_->Enqueue(&job.operation), absl::OkStatus());
    ASSERT_EQ(job.ended.get(), absl::OkStatus());
    EXPECT_EQ(testing::FakeGpuCopies() - before, copies);
    EXPECT_EQ(
        FirstDifference(job, Reference(job), testing::KernelTolerance(kernels::DType::kFloat16)),
        "");
  }
}

// Two requests of one launch append the same rows, each to a sequence of its own.
TEST_F(FakeGpuTest, AppendsTheSameSharedRowsTwice) {
  CudaDevice::Options options = SmallOptions();
  options.direct_io_bytes = 0;
  Start(options);
  const testing::TestSegment segment(size_t{256} << 10);
  const std::shared_ptr<const SharedRegion> region = segment.Map();
  AttendJob jobs[2];
  for (AttendJob& job : jobs) {
    const auto sequence =
        engine_->sequences().Create({1, 1, 64, kernels::DType::kFloat16}, false, "alice");
    AttendRequest& request = job.operation.request;
    request = testing::MakeRequest(1, 100);
    request.spans[0].sequence_id = sequence->id.ToBytes();
    request.ranges[kKey] = {region, 0};
    request.ranges[kValue] = {region, 32768};
    testing::FillTensors(&job, &random_);
    if (&job == &jobs[1]) {
      job.key = jobs[0].key;
      job.value = jobs[0].value;
    }
    ASSERT_EQ(Prepare(&job, engine_.get()), absl::OkStatus());
  }
  for (AttendJob& job : jobs) ASSERT_EQ(engine_->Enqueue(&job.operation), absl::OkStatus());
  for (AttendJob& job : jobs) {
    ASSERT_EQ(job.ended.get(), absl::OkStatus());
    job.operation.request.spans[0].sequence_id.clear();  // the reference takes inline K/V
    EXPECT_EQ(
        FirstDifference(job, Reference(job), testing::KernelTolerance(kernels::DType::kFloat16)),
        "");
  }
}

TEST_F(FakeGpuTest, WhatNoLaneHasRoomForIsRefusedWithItsSize) {
  CudaDevice::Options options = SmallOptions();
  options.workspace_bytes = 1024;
  Start(options);
  EXPECT_EQ(Attend(1, 100), absl::OkStatus());  // does not split
  absl::Status status = Attend(1, 5000);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("a lane has 1024"));
  status = Attend(1, 9000);  // K and V of 2.2 MiB
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("bytes of device memory"));
  EXPECT_EQ(Attend(1, 100), absl::OkStatus());
}

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
TEST_F(FakeGpuTest, AFailedLaunchLeavesNothingUnderWay) {
  CudaDevice::Options options = SmallOptions();
  options.direct_io_bytes = 0;
  Start(options);
  const int copies = testing::FakeGpuCopies();
  testing::FailFakeGpuLaunches(cudaErrorInvalidConfiguration);
  EXPECT_EQ(Attend(1, 100).code(), absl::StatusCode::kInternal);
  EXPECT_GT(testing::FakeGpuCopies(), copies);  // of its inputs
  EXPECT_EQ(testing::FakeGpuWaitingPieces(), 0);
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

TEST_F(FakeGpuTest, TheWindowCoversTheHotSegment) {
  CudaDevice::Options options = SmallOptions();
  Start(options);
  EXPECT_EQ(engine_->device().kv_memory().hot_bytes, kMiB);
  EXPECT_EQ(engine_->device().info().l2_window_bytes, kMiB);
  EXPECT_EQ(engine_->device().info().l2_persisting_bytes, kMiB);
  EXPECT_EQ(testing::FakeGpuWindowBytes(), kMiB);
  options.l2_budget_bytes = kMiB - 1;
  Start(options);
  EXPECT_EQ(engine_->device().kv_memory().hot_bytes, kMiB / 2);
  EXPECT_EQ(testing::FakeGpuWindowBytes(), kMiB / 2);
  options.l2_window = L2Window::kOff;
  Start(options);
  EXPECT_EQ(engine_->device().kv_memory().hot_bytes, 0u);
  EXPECT_NE(engine_->device().info().l2_note, "");
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
}

TEST_F(FakeGpuTest, AutoLeavesTheL2AsItWasIfTheWindowDoesNotPay) {
  CudaDevice::Options options = SmallOptions();
  options.l2_window = L2Window::kAuto;
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  ASSERT_EQ(cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, 4096), cudaSuccess);
  testing::SetFakeGpuWindowedTimes(0.24f, 0.245f);  // differences that may be noise
  const int resets = testing::FakeGpuL2Resets();
  Start(options);
  EXPECT_EQ(engine_->device().kv_memory().hot_bytes, 0u);
  EXPECT_EQ(engine_->device().info().l2_window_bytes, 0u);
  EXPECT_EQ(engine_->device().info().l2_persisting_bytes, 4096u);
  EXPECT_THAT(
      engine_->device().info().l2_note,
      HasSubstr("again took between other reads 240 us with a window, 250 us without (no gain); "
                "beside other reads 245 us with a window, 250 us without (no gain)"));
  EXPECT_EQ(testing::FakeGpuSetAsideBytes(), 4096u);
  EXPECT_GT(testing::FakeGpuL2Resets(), resets);
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
  const auto sequence =
      engine_->sequences().Create({1, 1, 64, kernels::DType::kFloat16}, /*pin=*/true, "alice");
  ASSERT_EQ(sequence.status(), absl::OkStatus());
  AttendJob job;
  job.operation.request = testing::MakeRequest(1, 1200);  // 19 pages of 16 KiB
  testing::FillTensors(&job, &random_);
  job.operation.request.spans[0].sequence_id = sequence->id.ToBytes();
  ASSERT_EQ(Prepare(&job, engine_.get()), absl::OkStatus());
  ASSERT_EQ(engine_->Enqueue(&job.operation), absl::OkStatus());
  ASSERT_EQ(job.ended.get(), absl::OkStatus());
  ASSERT_GE(engine_->sequences().stats().hot.used_bytes, kMiB / 4);

  const int resets = testing::FakeGpuL2Resets();
  ASSERT_EQ(engine_->sequences().Delete(sequence->id), absl::OkStatus());
  const TimePoint give_up = clock_.Now() + std::chrono::seconds(20);
  while (testing::FakeGpuL2Resets() == resets && clock_.Now() < give_up) std::this_thread::yield();
  EXPECT_EQ(testing::FakeGpuL2Resets(), resets + 1);
}

TEST_F(FakeGpuTest, AutoTakesTheGpu) {
  DeviceOptions options;
  options.cuda = {SmallOptions()};
  const auto opened = OpenDevices(options, &clock_);
  ASSERT_EQ(opened.status(), absl::OkStatus());
  ASSERT_EQ(opened->devices.size(), 1u);
  EXPECT_EQ(opened->devices[0]->info().id, "cuda:0");
}

TEST_F(FakeGpuTest, TooLittleMemoryStopsTheStartAndIsNotReplacedByTheCpu) {
  DeviceOptions options;
  options.cuda = {SmallOptions()};
  options.cuda[0].kv_memory_bytes = size_t{9} << 30;
  const absl::Status status = OpenDevices(options, &clock_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("9663676416 bytes for resident K/V"));
  EXPECT_THAT(status.message(), HasSubstr("of 8589934592 bytes are free"));
}

TEST_F(FakeGpuTest, StagingMemoryThatIsUsedUpIsRefusedAndComesBack) {
  CudaDevice::Options options = SmallOptions();
  options.staging_memory_bytes = 64 << 10;
  Start(options);
  EXPECT_EQ(Attend(1, 300).code(), absl::StatusCode::kResourceExhausted);  // K and V of 75 KiB
  for (int i = 0; i < 10; ++i) {  // sizes that do not fit side by side
    EXPECT_EQ(Attend(1, 200), absl::OkStatus());
    EXPECT_EQ(Attend(1, 1), absl::OkStatus());
    EXPECT_EQ(Attend(1, 100), absl::OkStatus());
  }
}

}  // namespace
}  // namespace flashcore::server
