// A fleet of two fake GPUs gives right results, also after the loss of one of them, and each thread
// uses its own GPU, which fake_gpu.cc checks.
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/device/open_device.h"
#include "server/engine/fleet.h"
#include "tests/base/test_seed.h"
#include "tests/device/fake_gpu.h"
#include "tests/device/fake_gpu_fixture.h"

namespace flashcore::server {
namespace {

using testing::AttendJob;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr size_t kMiB = size_t{1} << 20;

DeviceOptions TwoGpus() {
  const CudaDevice::Options gpu = testing::SmallOptions();
  DeviceOptions options;
  options.kind = DeviceOptions::Kind::kCuda;
  options.cuda = {gpu, gpu};
  options.cuda[1].ordinal = 1;
  return options;
}

class FakeGpusTest : public ::testing::Test {
 protected:
  FakeGpusTest() {
    Engine::Options options;
    options.sequences.superblock_bytes = kMiB / 2;
    options.on_device_lost = [this](const DeviceInfo& device, const absl::Status&) {
      std::lock_guard<std::mutex> lock(mutex_);
      lost_.push_back(device.id);
    };
    auto opened = OpenDevices(TwoGpus(), &clock_);
    fleet_ = std::make_unique<Fleet>(options, std::move(opened->devices), &clock_, &metrics_);
  }

  ~FakeGpusTest() override { testing::RestoreFakeGpus(); }

  SequenceId Create(const std::string& device_id) {
    return fleet_->Create({1, 1, 64, kernels::DType::kFloat16}, {false}, {"alice", {}}, device_id)
        ->id;
  }

  // A request that appends rows to the sequence and attends to all that it has then.
  std::unique_ptr<AttendJob> MakeAppend(SequenceId id, uint32_t rows) {
    auto job = std::make_unique<AttendJob>();
    job->operation.request = testing::MakeRequest(3, rows);
    job->operation.request.spans[0].sequence_id = id.ToBytes();
    testing::FillTensors(job.get(), &random_);
    return job;
  }

  absl::Status Submit(AttendJob* job) {
    const absl::Status status = Prepare(job, fleet_.get());
    return status.ok() ? fleet_->Enqueue(&job->operation) : status;
  }

  // The error in the results of the last of `jobs`, which have appended to one sequence.
  std::string CheckLast(const std::vector<std::unique_ptr<AttendJob>>& jobs) {
    AttendJob whole;  // the same with all rows inline
    uint32_t rows = 0;
    for (const auto& job : jobs) {
      whole.key.insert(whole.key.end(), job->key.begin(), job->key.end());
      whole.value.insert(whole.value.end(), job->value.begin(), job->value.end());
      rows += job->operation.request.spans[0].kv_rows;
    }
    whole.query = jobs.back()->query;
    whole.operation.request = testing::MakeRequest(3, rows);
    EXPECT_EQ(Prepare(&whole, fleet_.get()), absl::OkStatus());
    return FirstDifference(*jobs.back(), Reference(whole),
                           testing::KernelTolerance(kernels::DType::kFloat16));
  }

  uint64_t LengthOf(SequenceId id) const {
    return fleet_->EngineOf(id).sequences().Get(id, {"alice", {}})->layer_lengths[0];
  }

  // Attends to rows of the request: inline, or appended to an empty sequence. Returns what is wrong
  // with the results.
  std::string Attend(const std::string& sequence_id, std::mt19937* random) {
    AttendJob job;
    AttendRequest& request = job.operation.request;
    request = testing::MakeRequest(3, 200);
    request.spans[0].sequence_id = sequence_id;
    testing::FillTensors(&job, random);
    absl::Status status = Prepare(&job, fleet_.get());
    if (status.ok()) status = fleet_->Enqueue(&job.operation);
    if (status.ok()) status = job.ended.get();
    if (!status.ok()) return std::string(status.message());
    request.spans[0].sequence_id = {};  // the reference takes the same rows inline
    return FirstDifference(job, Reference(job), testing::KernelTolerance(request.dtype));
  }

  // Alternates a request on a new sequence with one that has no sequence.
  void AttendOn(const std::string& device_id, unsigned seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < 8; ++i) {
      const auto sequence = fleet_->Create({1, 1, 64, kernels::DType::kFloat16}, {i % 2 == 0},
                                           {"alice", {}}, device_id);
      ASSERT_EQ(sequence.status(), absl::OkStatus());
      EXPECT_EQ(fleet_->DeviceIdOf(sequence->id), device_id);
      EXPECT_EQ(Attend(sequence->id.ToBytes(), &random), "");
      EXPECT_EQ(Attend("", &random), "");
      SequenceStore& store = fleet_->EngineOf(sequence->id).sequences();
      EXPECT_EQ(store.Get(sequence->id, {"alice", {}})->layer_lengths[0], 200u);
      EXPECT_EQ(store.Delete(sequence->id, {"alice", {}}), absl::OkStatus());
    }
  }

  std::mt19937 random_{TestSeed()};
  std::mutex mutex_;
  std::vector<std::string> lost_;  // device ids, guarded by mutex_; outlives the fleet
  SteadyClock clock_;
  Metrics metrics_{{"test", {{"cuda:0", "fake", "fake"}, {"cuda:1", "fake", "fake"}}, {}}};
  std::unique_ptr<Fleet> fleet_;
};

TEST_F(FakeGpusTest, EachHasItsOwnMemoryAndWindow) {
  ASSERT_EQ(fleet_->engines().size(), 2u);
  const Device& first = fleet_->engines()[0]->device();
  const Device& second = fleet_->engines()[1]->device();
  EXPECT_EQ(first.info().id, "cuda:0");
  EXPECT_EQ(second.info().id, "cuda:1");
  EXPECT_NE(first.kv_memory().base, second.kv_memory().base);
  EXPECT_EQ(first.info().l2_window_bytes, kMiB);
  EXPECT_EQ(second.info().l2_window_bytes, kMiB);
  testing::ExpectWindows(0, first);
  testing::ExpectWindows(1, second);
}

TEST_F(FakeGpusTest, AttendOnBothAtATime) {
  const unsigned seed = TestSeed();
  std::vector<std::thread> clients;
  for (unsigned i = 0; i < 4; ++i) {
    clients.emplace_back([=] { AttendOn(i % 2 == 0 ? "cuda:0" : "cuda:1", seed + i); });
  }
  for (std::thread& client : clients) client.join();
  for (const auto& engine : fleet_->engines()) {
    EXPECT_EQ(engine->load(), 0);
    EXPECT_EQ(engine->sequences().stats().sequences, 0u);
    EXPECT_EQ(engine->sequences().stats().pages, 0u);
  }
}

TEST_F(FakeGpusTest, TheOtherServesOnWhenOneIsLost) {
  const SequenceId ids[] = {Create("cuda:0"), Create("cuda:1")};
  std::vector<std::unique_ptr<AttendJob>> jobs[2];  // of each GPU's sequence
  for (int gpu : {0, 1}) {
    jobs[gpu].push_back(MakeAppend(ids[gpu], 200));
    ASSERT_EQ(Submit(jobs[gpu][0].get()), absl::OkStatus());
    EXPECT_EQ(jobs[gpu][0]->ended.get(), absl::OkStatus());
  }

  // On each GPU one request runs, and two wait for their turn on the sequence.
  for (int gpu : {0, 1}) {
    testing::HoldFakeGpu(gpu, true);
    for (int i = 0; i < 3; ++i) {
      jobs[gpu].push_back(MakeAppend(ids[gpu], 10));
      ASSERT_EQ(Submit(jobs[gpu].back().get()), absl::OkStatus());
    }
    EXPECT_TRUE(testing::WaitUntil([&] { return testing::FakeGpuWaitingPieces(gpu) > 0; }));
  }
  testing::LoseFakeGpu(1, cudaErrorLaunchFailure);
  for (int i = 1; i < 4; ++i) EXPECT_TRUE(IsDeviceLost(jobs[1][i]->ended.get()));
  for (int i = 1; i < 4; ++i) EXPECT_FALSE(testing::HasEnded(*jobs[0][i]));
  testing::HoldFakeGpu(0, false);
  for (int i = 1; i < 4; ++i) EXPECT_EQ(jobs[0][i]->ended.get(), absl::OkStatus());
  EXPECT_EQ(CheckLast(jobs[0]), "");

  // Requests of the other GPU still run. Those of the lost one are refused.
  for (int gpu : {0, 1}) jobs[gpu].push_back(MakeAppend(ids[gpu], 70));
  ASSERT_EQ(Submit(jobs[0].back().get()), absl::OkStatus());
  EXPECT_EQ(jobs[0].back()->ended.get(), absl::OkStatus());
  EXPECT_EQ(CheckLast(jobs[0]), "");
  EXPECT_EQ(Submit(jobs[1].back().get()).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(LengthOf(ids[0]), 300u);
  EXPECT_EQ(LengthOf(ids[1]), 200u) << "failed launches append nothing";
  std::lock_guard<std::mutex> lock(mutex_);
  EXPECT_THAT(lost_, ElementsAre("cuda:1"));
}

// fake_gpu.cc checks that the thread has chosen the GPU of the stream, which is not its current
// one.
TEST(FakeGpus, EveryCallChoosesItsGpu) {
  const SteadyClock clock;
  const auto opened = OpenDevices(TwoGpus(), &clock);
  ASSERT_EQ(opened.status(), absl::OkStatus());
  Device& second = *opened->devices[1];
  std::byte* const page = second.kv_memory().base;
  const std::vector<kernels::PageCopy> copies = {{page, page + 1024}};
  const int resets[] = {testing::FakeGpuL2Resets(0), testing::FakeGpuL2Resets(1)};
  alignas(64) std::byte host[64];
  const auto on_gpu_0 = [](const std::function<absl::Status()>& call) {
    std::thread([&] {
      EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
      EXPECT_EQ(call(), absl::OkStatus());
      int gpu = 0;
      EXPECT_EQ(cudaGetDevice(&gpu), cudaSuccess);
      EXPECT_EQ(gpu, 1);
    }).join();
  };
  on_gpu_0([&] { return second.CopyPages(0, 1024, copies); });
  on_gpu_0([&] { return second.ResetPersistingL2(); });
  on_gpu_0([&] { return second.PinHostMemory(host, sizeof(host), /*read_only=*/false); });
  on_gpu_0([&] {
    second.UnpinHostMemory(host);
    return absl::OkStatus();
  });
  EXPECT_EQ(testing::FakeGpuL2Resets(0), resets[0]);
  EXPECT_EQ(testing::FakeGpuL2Resets(1), resets[1] + 1);
}

TEST(FakeGpus, OneThatIsNotThereStopsTheStart) {
  const SteadyClock clock;
  DeviceOptions options = TwoGpus();
  options.cuda[1].ordinal = 2;
  const absl::Status status = OpenDevices(options, &clock).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("there is no cuda:2: the driver has 2 GPUs"));
}

TEST(FakeGpus, AreNamedByWhatWasAsked) {
  const SteadyClock clock;
  const auto opened = OpenDevices(TwoGpus(), &clock);
  ASSERT_EQ(opened.status(), absl::OkStatus());
  EXPECT_EQ(opened->devices.size(), 2u);
  EXPECT_EQ(opened->reason, "--device=cuda:0,cuda:1");
}

// Tensors on a GPU are attended there; those on another are refused by name.
TEST_F(FakeGpusTest, MemoryOfAGpuIsForRequestsOfThatGpu) {
  const auto on = [&](const char* device_id) {
    auto memory = fleet_->AllocateShared(device_id, kMiB);
    EXPECT_EQ(memory.status(), absl::OkStatus());
    return std::shared_ptr<const SharedRegion>(std::move(memory->region));
  };
  const std::shared_ptr<const SharedRegion> first = on("cuda:0"), second = on("cuda:1");
  EXPECT_EQ(first->device(), 0);
  EXPECT_EQ(second->device(), 1);
  for (int i = 0; i < 8; ++i) {  // whatever the load
    AttendJob job;
    AttendRequest& request = job.operation.request;
    request = testing::MakeRequest(3, 50);
    request.ranges[kQuery] = {second, 0, request.query_bytes};
    request.ranges[kOutput] = {second, 65536, request.output_bytes()};
    testing::FillTensors(&job, &random_);
    ASSERT_EQ(Submit(&job), absl::OkStatus());
    ASSERT_EQ(job.ended.get(), absl::OkStatus());
    EXPECT_EQ(job.operation.device, 1u);
    EXPECT_EQ(
        FirstDifference(job, Reference(job), testing::KernelTolerance(kernels::DType::kFloat16)),
        "");
  }
  const std::unique_ptr<AttendJob> foreign = MakeAppend(Create("cuda:0"), 5);
  AttendRequest& request = foreign->operation.request;
  request.ranges[kValue] = {second, 0, request.value_bytes};
  absl::Status status = Submit(foreign.get());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("value_range: is memory of cuda:1, but spans[0] names a sequence of "
                        "cuda:0"));
  AttendJob both;
  both.operation.request = testing::MakeRequest(3, 50);
  both.operation.request.ranges[kKey] = {first, 0, both.operation.request.key_bytes};
  both.operation.request.ranges[kLse] = {second, 0, 0};
  status = Prepare(&both, fleet_.get());
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("lse_range: is memory of cuda:1, but key_range is memory of cuda:0"));
  EXPECT_EQ(fleet_->AllocateShared("cuda:2", 1).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace flashcore::server
