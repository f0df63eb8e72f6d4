// The whole core on the real CPU device, against the float64 reference.
#include "server/core/cpu_device.h"

#include <cmath>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/half.h"
#include "kernels/reference.h"
#include "server/core/engine.h"
#include "server/core/spans.h"
#include "tests/core/fakes.h"

namespace flashcore::server {
namespace {

using kernels::DType;

struct Job {
  AttendOperation operation;
  std::promise<absl::Status> promise;
  std::vector<std::byte> query, key, value;  // copies, since staging is given back
};

class CpuDeviceTest : public ::testing::TestWithParam<Layout> {
 protected:
  CpuDeviceTest() : engine_({}, std::make_unique<CpuDevice>(2, &clock_), &clock_, &metrics_) {}

  std::vector<std::byte> RandomTensor(size_t bytes, DType dtype) {
    std::normal_distribution<float> normal;
    std::vector<std::byte> tensor(bytes);
    for (size_t i = 0; i < bytes; i += 2) {
      const uint16_t element = kernels::FromFloat(dtype, normal(random_));
      std::memcpy(&tensor[i], &element, 2);
    }
    return tensor;
  }

  std::unique_ptr<Job> MakeJob(std::vector<SpanShape> spans, DType dtype, kernels::Mask mask) {
    auto job = std::make_unique<Job>();
    AttendRequest& request = job->operation.request;
    request = testing::MakeRequest(1, 1, 6, 2, 64);
    request.spans = std::move(spans);
    request.dtype = dtype;
    request.layout = GetParam();
    request.mask = mask;
    request.return_lse = true;
    size_t query_rows = 0, kv_rows = 0;
    for (const SpanShape& span : request.spans) {
      query_rows += span.query_rows;
      kv_rows += span.kv_rows;
    }
    request.query_bytes = query_rows * 6 * 64 * 2;
    request.key_bytes = request.value_bytes = kv_rows * 2 * 64 * 2;
    job->query = RandomTensor(request.query_bytes, dtype);
    job->key = RandomTensor(request.key_bytes, dtype);
    job->value = RandomTensor(request.value_bytes, dtype);
    job->operation.done = [&promise = job->promise](absl::Status status) {
      promise.set_value(std::move(status));
    };
    return job;
  }

  void Submit(Job* job) {
    AttendOperation& operation = job->operation;
    ASSERT_EQ(engine_.Prepare(&operation), absl::OkStatus());
    std::memcpy(operation.tensors.query(), job->query.data(), job->query.size());
    std::memcpy(operation.tensors.key(), job->key.data(), job->key.size());
    std::memcpy(operation.tensors.value(), job->value.data(), job->value.size());
    // What the kernel does not write stays NaN.
    std::memset(operation.tensors.output(), 0xff, operation.request.output_bytes());
    std::memset(operation.tensors.lse(), 0xff, operation.request.lse_bytes());
    ASSERT_EQ(engine_.Submit(&operation), absl::OkStatus());
  }

  static std::vector<std::byte> OutputBits(const Job& job) {
    const AttendTensors& tensors = job.operation.tensors;
    const size_t output = job.operation.request.output_bytes();
    const size_t lse = job.operation.request.lse_bytes();
    std::vector<std::byte> bits(output + lse);
    std::memcpy(bits.data(), tensors.output(), output);
    std::memcpy(bits.data() + output, tensors.lse(), lse);
    return bits;
  }

  void ExpectMatchesReference(const Job& job);

  SteadyClock clock_;
  Metrics metrics_{testing::FakeMetricsOptions()};
  Engine engine_;
  std::mt19937 random_{20261121};
};

void CpuDeviceTest::ExpectMatchesReference(const Job& job) {
  const AttendRequest& request = job.operation.request;
  std::vector<kernels::Span> spans;
  std::vector<std::byte> unused(request.output_bytes());  // the reference has its own output
  AppendSpans(request, {job.query.data(), job.key.data(), job.value.data(), unused.data(), nullptr},
              &spans);
  const auto want = kernels::ReferenceAttention(
      {request.geometry(), spans.data(), static_cast<int32_t>(spans.size())});
  const int heads = 6, dim = 64;
  const double tolerance = request.dtype == DType::kFloat16 ? 2e-3 : 1.6e-2;
  const auto* output = reinterpret_cast<const uint16_t*>(job.operation.tensors.output());
  const float* lse = job.operation.tensors.lse();
  size_t base = 0;  // rows of the spans before
  for (const SpanShape& span : request.spans) {
    const size_t rows = span.query_rows;
    for (size_t row = 0; row < rows; ++row) {
      for (int head = 0; head < heads; ++head) {
        const size_t in_span =
            request.layout == Layout::kNhd ? row * heads + head : head * rows + row;
        const size_t got = base * heads + in_span;
        const size_t expected = (base + row) * heads + head;
        if (std::isinf(want.lse[expected])) {
          EXPECT_EQ(lse[got], -INFINITY);
        } else {
          EXPECT_NEAR(lse[got], want.lse[expected], 1e-4);
        }
        for (int d = 0; d < dim; ++d) {
          ASSERT_NEAR(kernels::ToFloat(request.dtype, output[got * dim + d]),
                      want.output[expected * dim + d], tolerance)
              << "row " << row << " head " << head << " dim " << d;
        }
      }
    }
    base += rows;
  }
}

TEST_P(CpuDeviceTest, RaggedRequestsMatchTheReference) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const kernels::Mask mask :
         {kernels::Mask::None(), kernels::Mask::Causal(), kernels::Mask::SlidingWindow(20, 0)}) {
      auto job = MakeJob({{1, 130, "", {}}, {5, 3, "", {}}, {70, 70, "", {}}, {2, 0, "", {}}},
                         dtype, mask);
      Submit(job.get());
      ASSERT_EQ(job->promise.get_future().get(), absl::OkStatus());
      ExpectMatchesReference(*job);
    }
  }
}

TEST_P(CpuDeviceTest, BitsAreEqualAloneAndInAMixedBatch) {
  auto alone =
      MakeJob({{3, 700, "", {}}, {1, 65, "", {}}}, DType::kFloat16, kernels::Mask::Causal());
  Submit(alone.get());
  ASSERT_EQ(alone->promise.get_future().get(), absl::OkStatus());
  const std::vector<std::byte> want = OutputBits(*alone);

  std::vector<std::unique_ptr<Job>> jobs;
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
    ASSERT_EQ(job->promise.get_future().get(), absl::OkStatus());
    if (job->query == alone->query) {
      EXPECT_EQ(OutputBits(*job), want);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, CpuDeviceTest, ::testing::Values(Layout::kNhd, Layout::kHnd),
                         [](const auto& param) {
                           return param.param == Layout::kNhd ? "NHD" : "HND";
                         });

}  // namespace
}  // namespace flashcore::server
