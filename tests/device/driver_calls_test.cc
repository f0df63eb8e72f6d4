// Requests take no resources from the GPU's driver.
#include "tests/device/driver_calls.h"

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/device/cuda_device.h"
#include "server/engine/engine.h"
#include "tests/base/test_seed.h"
#include "tests/engine/attend_job.h"
#include "tests/engine/fakes.h"

namespace flashcore::server {
namespace {

using testing::AttendJob;

constexpr size_t kMiB = size_t{1} << 20;
constexpr uint32_t kLayers = 4;
constexpr uint32_t kHeadDim = 64;

class DriverCallsTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const absl::Status found = CudaDevice::Find(0);
    if (!found.ok()) GTEST_SKIP() << found;
    CudaDevice::Options options;
    options.kv_memory_bytes = 64 * kMiB;
    options.max_request_bytes = kMiB;
    options.workspace_bytes = 4 * kMiB;
    options.list_bytes = kMiB;
    engine_ = std::make_unique<Engine>(Engine::Options(), CudaDevice::Create(options).value(),
                                       &clock_, &metrics_);
    const SequenceShape shape{kLayers, 1, kHeadDim, kernels::DType::kFloat16};
    sequence_ =
        engine_->sequences().Create(shape, {/*pin=*/false}, {"alice", {}}).value().id.ToBytes();
  }

  // Submits a request with inline K/V of up to 600 rows, or one decode token on the next layer.
  std::unique_ptr<AttendJob> Submit(uint32_t number) {
    auto job = std::make_unique<AttendJob>();
    AttendRequest& request = job->operation.request;
    if (number % 2 == 0) {
      request = testing::MakeRequest(1 + random_() % 20, 1 + random_() % 600);
    } else {
      request = testing::MakeRequest(1, 1);
      request.layer = number / 2 % kLayers;
      request.spans[0].sequence_id = sequence_;
    }
    request.return_lse = random_() % 2 == 0;
    job->query.resize(request.query_bytes);
    job->key.resize(request.key_bytes);
    job->value.resize(request.value_bytes);
    EXPECT_EQ(Prepare(job.get(), engine_.get()), absl::OkStatus());
    EXPECT_EQ(engine_->Enqueue(&job->operation), absl::OkStatus());
    return job;
  }

  SteadyClock clock_;
  MetricRegistry registry_;
  DeviceMetrics metrics_{"cuda:0", &registry_};
  std::unique_ptr<Engine> engine_;
  std::string sequence_;
  std::mt19937 random_{TestSeed()};
};

TEST_P(DriverCallsTest, ThereAreNoneInAThousandRequests) {
  constexpr uint32_t kRequests = 1000, kAtATime = 40;
  const int calls = testing::DriverResourceCalls();
  EXPECT_GT(calls, 10) << "the start takes resources, but none are counted";
  for (uint32_t number = 0; number < kRequests && !HasFailure();) {
    std::vector<std::unique_ptr<AttendJob>> jobs;
    for (uint32_t i = 0; i < kAtATime; ++i) jobs.push_back(Submit(number++));
    for (const auto& job : jobs) ASSERT_EQ(job->ended.get(), absl::OkStatus());
  }
  EXPECT_EQ(testing::DriverResourceCalls(), calls);
}

INSTANTIATE_TEST_SUITE_P(Devices, DriverCallsTest, ::testing::Values("cuda"),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace flashcore::server
