// A whole engine on real devices, against the float64 reference.
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "tests/device/device_setting.h"
#include "tests/engine/attend_job.h"
#include "tests/engine/fakes.h"

namespace flashcore::server {
namespace {

using kernels::DType;
using testing::AttendJob;
using testing::DeviceSetting;
using testing::KernelTolerance;

class RealDeviceTest : public ::testing::TestWithParam<std::tuple<DeviceSetting, Layout>> {
 protected:
  void SetUp() override {
    const DeviceSetting& setting = std::get<0>(GetParam());
    if (const std::string why = setting.why_none(); !why.empty()) GTEST_SKIP() << why;
    engine_ = std::make_unique<Engine>(
        Engine::Options(), setting.make(size_t{16} << 20, 0, &clock_), &clock_, &metrics_);
  }

  std::unique_ptr<AttendJob> MakeJob(std::vector<SpanShape> spans, DType dtype,
                                     kernels::Mask mask) {
    auto job = std::make_unique<AttendJob>();
    AttendRequest& request = job->operation.request;
    request = testing::MakeRequest(1, 1, 6, 2, 64);
    request.dtype = dtype;
    request.layout = std::get<1>(GetParam());
    request.mask = mask;
    request.return_lse = true;
    testing::SetSpans(std::move(spans), &request);
    testing::FillTensors(job.get(), &random_);
    return job;
  }

  void Submit(AttendJob* job) {
    ASSERT_EQ(testing::Prepare(job, engine_.get()), absl::OkStatus());
    ASSERT_EQ(engine_->Enqueue(&job->operation), absl::OkStatus());
  }

  static std::vector<std::byte> OutputBits(const AttendJob& job) {
    const AttendTensors& tensors = job.operation.tensors;
    const size_t output = job.operation.request.output_bytes();
    const size_t lse = job.operation.request.lse_bytes();
    std::vector<std::byte> bits(output + lse);
    std::memcpy(bits.data(), tensors.output(), output);
    std::memcpy(bits.data() + output, tensors.lse(), lse);
    return bits;
  }

  SteadyClock clock_;
  MetricRegistry registry_;
  DeviceMetrics metrics_{"fake", &registry_};
  std::unique_ptr<Engine> engine_;
  std::mt19937 random_{20261121};
};

TEST_P(RealDeviceTest, RaggedRequestsMatchTheReference) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const kernels::Mask mask :
         {kernels::Mask::None(), kernels::Mask::Causal(), kernels::Mask::SlidingWindow(20, 0)}) {
      auto job = MakeJob({{1, 130, "", {}}, {5, 3, "", {}}, {70, 70, "", {}}, {2, 0, "", {}}},
                         dtype, mask);
      Submit(job.get());
      ASSERT_EQ(job->ended.get(), absl::OkStatus());
      EXPECT_EQ(FirstDifference(*job, Reference(*job), KernelTolerance(dtype)), "");
    }
  }
}

// More work than the lists of a small lane hold.
TEST_P(RealDeviceTest, ManySpansMatchTheReference) {
  std::vector<SpanShape> spans;
  for (uint32_t i = 0; i < 40; ++i) spans.push_back({1 + i % 4, i % 37, "", {}});
  auto job = MakeJob(spans, DType::kFloat16, kernels::Mask::Causal());
  Submit(job.get());
  ASSERT_EQ(job->ended.get(), absl::OkStatus());
  EXPECT_EQ(FirstDifference(*job, Reference(*job), KernelTolerance(DType::kFloat16)), "");
}

// More pages than such a list holds appends.
TEST_P(RealDeviceTest, ALongAppendMatchesTheReference) {
  auto job = std::make_unique<AttendJob>();
  AttendRequest& request = job->operation.request;
  request = testing::MakeRequest(2, 2500, 2, 1, 32);
  request.layout = std::get<1>(GetParam());
  testing::FillTensors(job.get(), &random_);
  const auto sequence =
      engine_->sequences().Create({1, 1, 32, DType::kFloat16}, /*pin=*/false, "alice");
  ASSERT_EQ(sequence.status(), absl::OkStatus());
  request.spans[0].sequence_id = sequence->id.ToBytes();
  Submit(job.get());
  ASSERT_EQ(job->ended.get(), absl::OkStatus());
  request.spans[0].sequence_id.clear();  // the reference takes the appended rows as inline K/V
  EXPECT_EQ(FirstDifference(*job, Reference(*job), KernelTolerance(DType::kFloat16)), "");
}

TEST_P(RealDeviceTest, BitsAreEqualAloneAndInAMixedBatch) {
  auto alone =
      MakeJob({{3, 700, "", {}}, {1, 65, "", {}}}, DType::kFloat16, kernels::Mask::Causal());
  Submit(alone.get());
  ASSERT_EQ(alone->ended.get(), absl::OkStatus());
  const std::vector<std::byte> want = OutputBits(*alone);

  std::vector<std::unique_ptr<AttendJob>> jobs;
  for (int i = 0; i < 12; ++i) {
    const auto query_rows = static_cast<uint32_t>(1 + random_() % 40);
    const auto kv_rows = static_cast<uint32_t>(random_() % 900);
    jobs.push_back(
        MakeJob({{query_rows, kv_rows, "", {}}}, DType::kFloat16, kernels::Mask::None()));
    if (i % 3 != 0) continue;
    auto same = MakeJob(alone->operation.request.spans, DType::kFloat16, kernels::Mask::Causal());
    same->query = alone->query;
    same->key = alone->key;
    same->value = alone->value;
    jobs.push_back(std::move(same));
  }
  for (auto& job : jobs) Submit(job.get());
  for (auto& job : jobs) {
    ASSERT_EQ(job->ended.get(), absl::OkStatus());
    if (job->query == alone->query) {
      EXPECT_EQ(OutputBits(*job), want);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, RealDeviceTest,
                         ::testing::Combine(::testing::ValuesIn(testing::RealDevices()),
                                            ::testing::Values(Layout::kNhd, Layout::kHnd)),
                         [](const auto& param) {
                           const bool nhd = std::get<1>(param.param) == Layout::kNhd;
                           return std::get<0>(param.param).name + (nhd ? "_NHD" : "_HND");
                         });

}  // namespace
}  // namespace flashcore::server
