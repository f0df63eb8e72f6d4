// A fleet of two fake GPUs gives right results, and each thread uses its own GPU, which fake_gpu.cc
// checks.
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/device/open_device.h"
#include "server/engine/fleet.h"
#include "tests/device/fake_gpu.h"
#include "tests/engine/attend_job.h"
#include "tests/engine/fakes.h"

namespace flashcore::server {
namespace {

using testing::AttendJob;
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
    auto opened = OpenDevices(TwoGpus(), &clock_);
    fleet_ = std::make_unique<Fleet>(options, std::move(opened->devices), &clock_, &metrics_);
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
    request.spans[0].sequence_id.clear();  // the reference takes the same rows inline
    return FirstDifference(job, Reference(job), testing::KernelTolerance(request.dtype));
  }

  // Alternates a request on a new sequence with one that has no sequence.
  void AttendOn(const std::string& device_id, unsigned seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < 20; ++i) {
      const auto sequence =
          fleet_->Create({1, 1, 64, kernels::DType::kFloat16}, i % 2 == 0, "alice", device_id);
      ASSERT_EQ(sequence.status(), absl::OkStatus());
      EXPECT_EQ(fleet_->DeviceIdOf(sequence->id), device_id);
      EXPECT_EQ(Attend(sequence->id.ToBytes(), &random), "");
      EXPECT_EQ(Attend("", &random), "");
      SequenceStore& store = fleet_->EngineOf(sequence->id).sequences();
      EXPECT_EQ(store.Get(sequence->id)->layer_lengths[0], 200u);
      EXPECT_EQ(store.Delete(sequence->id), absl::OkStatus());
    }
  }

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
}

TEST_F(FakeGpusTest, AttendOnBothAtATime) {
  const unsigned seed = testing::TestSeed();
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

}  // namespace
}  // namespace flashcore::server
