// Launches that a lane prepares before their inputs are ready, on a fake GPU.
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/input_waits.h"
#include "server/memory/shared_memory.h"
#include "server/request/sequence_id.h"
#include "tests/base/fake_clock.h"
#include "tests/device/fake_gpu.h"
#include "tests/device/fake_gpu_fixture.h"
#include "tests/memory/memfd.h"

namespace flashcore::server {
namespace {

using testing::AttendJob;
using testing::HasEnded;
using testing::SmallOptions;
using testing::WaitUntil;

constexpr size_t kMiB = size_t{1} << 20;
constexpr uint64_t kInputs = 0, kResults = 64;  // counters

// Nobody polls waits_, unless a test does: so a request that runs was staged. The clock stands
// still, so a lane keeps what it has staged.
class FakeGpuStagingTest : public testing::FakeGpuTest {
 protected:
  ~FakeGpuStagingTest() override { Stop(); }

  void Stop() {
    region_.reset();
    memory_.reset();
    engine_.reset();
  }

  void StartStaging(CudaDevice::Options options = SmallOptions(), Engine::Options engine = {}) {
    Stop();
    options.idle_spin = std::chrono::milliseconds(1);
    engine.input_waits = &waits_;
    engine_ =
        std::make_unique<Engine>(engine, CudaDevice::Create(options).value(), &still_, &metrics_);
    memory_ = std::make_unique<SharedMemory>(SharedMemory::Options(), &engine_->device(), &bytes_,
                                             &regions_);
    region_ = memory_->Map(FileDescriptor(dup(file_.fd())), file_.bytes(), /*read_only=*/false, "a")
                  .value();
  }
  // In the server's mapping: ThreadSanitizer does not know that another one is the same memory.
  std::atomic<uint64_t>& counter(uint64_t offset) const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(region_->data() + offset);
  }

  // Admits `job`, and lets it wait until kInputs is `value`.
  void Await(AttendJob* job, uint64_t value = 1) {
    job->operation.request.inputs_ready = {region_, kInputs, value};
    job->operation.request.results_ready = {region_, kResults, value};
    FillTensors(job, &random_);
    ASSERT_EQ(Prepare(job, engine_.get()), absl::OkStatus());
    waits_.Add(&job->operation, [this, job](absl::Status ready) {
      if (ready.ok()) ready = engine_->Enqueue(&job->operation);
      if (!ready.ok()) job->operation.done(std::move(ready));
    });
    engine_->WakeLane();
  }
  // The same, and a lane has staged it.
  void Stage(AttendJob* job, uint64_t value = 1) {
    const int before = testing::FakeGpuGraphs();
    Await(job, value);
    ASSERT_TRUE(WaitUntil([&] { return testing::FakeGpuGraphs() > before; }));
  }
  void ExpectGivenBack() {
    ASSERT_TRUE(WaitUntil([this] { return !waits_.empty(); }));
  }
  std::string NewSequence() {
    const SequenceShape shape{2, 1, 64, kernels::DType::kFloat16};
    return engine_->sequences().Create(shape, {}, {"alice", {}}).value().id.ToBytes();
  }
  uint64_t Length(const std::string& sequence) {
    const SequenceName name(sequence);
    return engine_->sequences().Get(name.id(), {"alice", {}}).value().layer_lengths[0];
  }
  // A step of one row in layer 0.
  static void SetStep(const std::string& sequence, AttendJob* job) {
    job->operation.request = testing::MakeRequest(1, 1);
    job->operation.request.spans[0].sequence_id = sequence;
  }
  static std::string Difference(const AttendJob& job) {
    return FirstDifference(job, Reference(job), testing::KernelTolerance(kernels::DType::kFloat16));
  }
  // The first step of a sequence sees its own row alone.
  static void ExpectOutputIsValue(const AttendJob& job) {
    const AttendOperation& operation = job.operation;
    for (size_t at = 0; at < operation.request.output_bytes(); at += job.value.size()) {
      EXPECT_EQ(std::memcmp(operation.tensors.output() + at, job.value.data(), job.value.size()),
                0);
    }
  }
  uint64_t Launches() const { return metrics_.batch_requests.Collect().histogram.sample_count; }

  testing::FakeClock still_;
  InputWaits waits_{&still_};
  const testing::Memfd file_{kMiB};
  Gauge bytes_, regions_;
  std::unique_ptr<SharedMemory> memory_;
  std::shared_ptr<const SharedRegion> region_;
};

TEST_F(FakeGpuStagingTest, ALaunchBeginsWhenItsInputsAreThere) {
  for (const size_t direct_io_bytes : {size_t{0}, kMiB}) {
    CudaDevice::Options options = SmallOptions();
    options.direct_io_bytes = direct_io_bytes;
    StartStaging(options);
    for (const uint64_t turn : {1, 2, 3}) {
      const uint64_t value = turn + direct_io_bytes;
      AttendJob job;
      job.operation.request = testing::MakeRequest(3, 100 + 50 * static_cast<uint32_t>(turn));
      Stage(&job, value);
      FillTensors(&job, &random_);  // written while it is staged
      WriteInputs(&job);
      EXPECT_FALSE(HasEnded(job));
      counter(kInputs) = value;
      ASSERT_EQ(job.ended.get(), absl::OkStatus());
      EXPECT_EQ(Difference(job), "");
      EXPECT_TRUE(job.operation.raised_by_device);
      EXPECT_EQ(counter(kResults), value);
    }
  }
}

// The layers of a model, submitted ahead: each is staged when the one before it has begun.
TEST_F(FakeGpuStagingTest, TheNextIsStagedWhileOneRuns) {
  StartStaging();
  AttendJob first, second;
  first.operation.request = testing::MakeRequest(3, 50);
  second.operation.request = testing::MakeRequest(2, 70);
  Stage(&first, 1);
  Await(&second, 2);
  EXPECT_FALSE(waits_.empty()) << "one at a time";
  testing::HoldFakeGpu(0, true);
  counter(kInputs) = 1;
  ASSERT_TRUE(WaitUntil([this] { return waits_.empty(); }));
  EXPECT_FALSE(HasEnded(first));
  testing::HoldFakeGpu(0, false);
  ASSERT_EQ(first.ended.get(), absl::OkStatus());
  counter(kInputs) = 2;
  ASSERT_EQ(second.ended.get(), absl::OkStatus());
  EXPECT_EQ(Difference(first), "");
  EXPECT_EQ(Difference(second), "");
}

TEST_F(FakeGpuStagingTest, ItGivesWayToARequestThatNoOtherLaneTakes) {
  CudaDevice::Options options = SmallOptions();
  options.lanes = 1;
  StartStaging(options);
  const std::string sequence = NewSequence();
  AttendJob staged;
  SetStep(sequence, &staged);
  Stage(&staged);
  ASSERT_EQ(Attend(3, 40), absl::OkStatus());
  ExpectGivenBack();
  EXPECT_FALSE(HasEnded(staged));
  EXPECT_EQ(Length(sequence), 0u);
  EXPECT_EQ(Launches(), 1u);
  EXPECT_EQ(metrics_.kv_read_hot_bytes.Value() + metrics_.kv_read_cold_bytes.Value(), 0);
  counter(kInputs) = 1;
  EXPECT_TRUE(waits_.Poll());
  ASSERT_EQ(staged.ended.get(), absl::OkStatus());
  ExpectOutputIsValue(staged);
  EXPECT_EQ(Length(sequence), 1u);
  EXPECT_EQ(Launches(), 2u);
  const double page_bytes = 2 * 64 * 64 * 2;
  EXPECT_EQ(metrics_.kv_read_hot_bytes.Value() + metrics_.kv_read_cold_bytes.Value(), page_bytes);
}

// It came later, but its inputs are there.
TEST_F(FakeGpuStagingTest, ItGivesWayToARequestOnItsLayer) {
  StartStaging();
  const std::string sequence = NewSequence();
  AttendJob staged, ready;
  SetStep(sequence, &staged);
  Stage(&staged);
  SetStep(sequence, &ready);
  ready.operation.request.spans[0].expected_length = 0;
  ASSERT_EQ(Attend(&ready), absl::OkStatus());
  ExpectGivenBack();
  counter(kInputs) = 1;
  EXPECT_TRUE(waits_.Poll());
  ASSERT_EQ(staged.ended.get(), absl::OkStatus());
  EXPECT_EQ(staged.operation.sequence_lengths[0], 2u);
}

TEST_F(FakeGpuStagingTest, ACancelAndADeadlineEndIt) {
  StartStaging();
  const std::string sequence = NewSequence();
  AttendJob cancelled, late;
  SetStep(sequence, &cancelled);
  Stage(&cancelled, 1);
  cancelled.operation.Cancel();
  EXPECT_EQ(cancelled.ended.get().code(), absl::StatusCode::kCancelled);
  SetStep(sequence, &late);
  late.operation.deadline = still_.Now() + std::chrono::milliseconds(1);
  Stage(&late, 2);
  still_.Advance(std::chrono::milliseconds(1));
  EXPECT_EQ(late.ended.get().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Length(sequence), 0u);
  EXPECT_EQ(counter(kResults), 0u);
  EXPECT_EQ(Launches(), 0u);
  AttendJob next;
  SetStep(sequence, &next);
  EXPECT_EQ(Attend(&next), absl::OkStatus());
  EXPECT_EQ(Length(sequence), 1u);
}

// Memory of deleted sequences is free again only when no launch is under way.
TEST_F(FakeGpuStagingTest, ALaneWaitsForItOnlyForAWhile) {
  StartStaging();
  const std::string sequence = NewSequence();
  AttendJob step, staged;
  SetStep(sequence, &step);
  ASSERT_EQ(Attend(&step), absl::OkStatus());
  SetStep(sequence, &staged);
  Stage(&staged);
  ASSERT_TRUE(WaitUntil([this] {
    still_.Advance(std::chrono::milliseconds(5));
    return !waits_.empty();
  }));
  EXPECT_EQ(Attend(1, 1), absl::OkStatus());
  EXPECT_FALSE(waits_.empty()) << "nor is it staged again";
  counter(kInputs) = 1;
  EXPECT_TRUE(waits_.Poll());
  ASSERT_EQ(staged.ended.get(), absl::OkStatus());
  EXPECT_EQ(Length(sequence), 2u);
}

TEST_F(FakeGpuStagingTest, WithoutCapturesRequestsAreNotStaged) {
  for (const int successes : {0, 1, 2}) {  // begin, end, instantiate
    StartStaging();
    const std::string sequence = NewSequence();
    testing::FailFakeGpuCaptures(true, successes);
    const uint64_t value = static_cast<uint64_t>(successes) + 1;
    AttendJob job;
    SetStep(sequence, &job);
    Await(&job, value);
    counter(kInputs) = value;
    ASSERT_TRUE(WaitUntil([&] {
      waits_.Poll();
      return HasEnded(job);
    }));
    testing::FailFakeGpuCaptures(false);
    ASSERT_EQ(job.ended.get(), absl::OkStatus()) << successes;
    ExpectOutputIsValue(job);
    EXPECT_EQ(Length(sequence), 1u);
  }
}

// In parts, or in several passes.
TEST_F(FakeGpuStagingTest, LongLaunchesAreNotStaged) {
  for (const bool in_parts : {true, false}) {
    CudaDevice::Options options = SmallOptions();
    Engine::Options engine;
    if (in_parts) {
      engine.batcher.max_launch = Nanoseconds(1);
    } else {
      options.list_bytes = 2048;
    }
    StartStaging(options, engine);
    AttendJob job;
    job.operation.request = testing::MakeRequest(500, 200);
    const uint64_t value = in_parts ? 1 : 2;
    Await(&job, value);
    counter(kInputs) = value;
    ASSERT_TRUE(WaitUntil([&] {
      waits_.Poll();
      return HasEnded(job);
    }));
    ASSERT_EQ(job.ended.get(), absl::OkStatus());
    EXPECT_EQ(Difference(job), "");
    EXPECT_EQ(counter(kResults), value);
  }
}

TEST_F(FakeGpuStagingTest, ADrainEndsIt) {
  StartStaging();
  AttendJob job;
  job.operation.request = testing::MakeRequest(3, 50);
  Stage(&job);
  waits_.EndAll(absl::UnavailableError("the end"));
  engine_->EndAll(absl::UnavailableError("the end"));
  EXPECT_EQ(job.ended.get(), absl::UnavailableError("the end"));
  EXPECT_EQ(engine_->load(), 0);
}

TEST_F(FakeGpuStagingTest, AFailedLaunchFailsIt) {
  StartStaging();
  const std::string sequence = NewSequence();
  AttendJob job;
  SetStep(sequence, &job);
  Stage(&job);
  testing::FailFakeGpuLaunches(cudaErrorInvalidConfiguration);
  counter(kInputs) = 1;
  EXPECT_EQ(job.ended.get().code(), absl::StatusCode::kInternal);
  testing::FailFakeGpuLaunches(cudaSuccess);
  EXPECT_EQ(Length(sequence), 0u);
  EXPECT_EQ(Attend(1, 1), absl::OkStatus());
}

}  // namespace
}  // namespace flashcore::server
