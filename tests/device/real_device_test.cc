// A whole engine on real devices, against the float64 reference.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/half.h"
#include "server/engine/engine.h"
#include "server/request/tensors.h"
#include "tests/base/test_seed.h"
#include "tests/device/device_setting.h"
#include "tests/engine/attend_job.h"
#include "tests/engine/fakes.h"
#include "tests/engine/plan_probe.h"

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
    request = testing::MakeRequest(1, 1, 6, kKvHeads, kHeadDim);
    request.dtype = dtype;
    request.layout = std::get<1>(GetParam());
    request.terms.mask = mask;
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

  // The rows [begin, end) of a K or V tensor of `rows` rows.
  static std::vector<std::byte> Rows(const std::vector<std::byte>& tensor, uint32_t rows,
                                     uint32_t begin, uint32_t end) {
    const bool nhd = std::get<1>(GetParam()) == Layout::kNhd;
    const size_t row_bytes = (nhd ? kKvHeads : 1) * kHeadDim * sizeof(uint16_t);
    std::vector<std::byte> part;
    for (auto head = tensor.begin(); head != tensor.end(); head += rows * row_bytes) {
      part.insert(part.end(), head + begin * row_bytes, head + end * row_bytes);
    }
    return part;
  }

  // Makes the values of the first `split` K/V rows of the job's span positive, the others negative.
  static void SetSigns(uint32_t split, AttendJob* job) {
    const bool nhd = std::get<1>(GetParam()) == Layout::kNhd;
    const size_t row_bytes = (nhd ? kKvHeads : 1) * kHeadDim * sizeof(uint16_t);
    const uint32_t rows = job->operation.request.spans[0].kv_rows;
    for (size_t i = 1; i < job->value.size(); i += sizeof(uint16_t)) {  // bytes with a sign
      const std::byte magnitude = job->value[i] & std::byte{0x7f};
      const bool positive = i / row_bytes % rows < split;
      job->value[i] = positive ? magnitude : magnitude | std::byte{0x80};
    }
  }

  // The same queries over the K/V rows [begin, end) of `whole`: inline, or appended to a sequence.
  std::unique_ptr<AttendJob> AttendToPart(const AttendJob& whole, uint32_t begin, uint32_t end,
                                          kernels::Mask mask, bool resident) {
    const SpanShape& shape = whole.operation.request.spans[0];
    auto job = std::make_unique<AttendJob>();
    AttendRequest& request = job->operation.request;
    request = whole.operation.request;
    request.terms.mask = mask;
    std::string id;
    if (resident) {
      id = engine_->sequences()
               .Create({1, kKvHeads, kHeadDim, request.dtype}, {}, {"alice", {}})
               ->id.ToBytes();
    }
    testing::SetSpans({{shape.query_rows, end - begin, id, {}}}, &request);
    job->query = whole.query;
    job->key = Rows(whole.key, shape.kv_rows, begin, end);
    job->value = Rows(whole.value, shape.kv_rows, begin, end);
    Submit(job.get());
    EXPECT_EQ(job->ended.get(), absl::OkStatus());
    return job;
  }

  // Writes the merged results of `a` and `b` to those of `to`, as attention.proto defines it.
  static void Merge(const AttendJob& a, const AttendJob& b, AttendJob* to) {
    const AttendTensors &first = a.operation.tensors, &second = b.operation.tensors;
    const DType dtype = a.operation.request.dtype;
    const auto output = [dtype](const AttendTensors& tensors, size_t i) {
      return double{
          kernels::ToFloat(dtype, reinterpret_cast<const uint16_t*>(tensors.output())[i])};
    };
    auto* const merged = reinterpret_cast<uint16_t*>(to->operation.tensors.output());
    const size_t vectors = a.operation.request.lse_bytes() / sizeof(float);
    for (size_t i = 0; i < vectors; ++i) {
      const double lse_a = first.lse()[i], lse_b = second.lse()[i];
      const double lse = std::log(std::exp(lse_a) + std::exp(lse_b));
      to->operation.tensors.lse()[i] = static_cast<float>(lse);
      for (size_t d = i * kHeadDim; d < (i + 1) * kHeadDim; ++d) {
        merged[d] = kernels::FromFloat(
            dtype, static_cast<float>(std::exp(lse_a - lse) * output(first, d) +
                                      std::exp(lse_b - lse) * output(second, d)));
      }
    }
  }

  static constexpr uint32_t kKvHeads = 2, kHeadDim = 64;
  SteadyClock clock_;
  MetricRegistry registry_;
  DeviceMetrics metrics_{"fake", &registry_};
  std::unique_ptr<Engine> engine_;
  std::mt19937 random_{TestSeed()};
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
      engine_->sequences().Create({1, 1, 32, DType::kFloat16}, {/*pin=*/false}, {"alice", {}});
  ASSERT_EQ(sequence.status(), absl::OkStatus());
  request.spans[0].sequence_id = sequence->id.ToBytes();
  Submit(job.get());
  ASSERT_EQ(job->ended.get(), absl::OkStatus());
  request.spans[0].sequence_id = {};  // the reference takes the appended rows as inline K/V
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

// Launches that are cut into parts have the bits of those that are not.
TEST_P(RealDeviceTest, BitsAreEqualInParts) {
  const DeviceSetting& setting = std::get<0>(GetParam());
  Engine::Options options;
  options.batcher.max_launch = Nanoseconds(1);  // as small as parts can be
  DeviceMetrics metrics{"in parts", &registry_};
  testing::PlanCounts counts;
  Engine in_parts(
      options,
      std::make_unique<testing::PlanProbe>(setting.make(size_t{16} << 20, 0, &clock_), &counts),
      &clock_, &metrics);
  const kernels::Mask masks[] = {kernels::Mask::None(), kernels::Mask::Causal(),
                                 kernels::Mask::SlidingWindow(200, 0)};
  constexpr int kTrials = 6;
  for (int trial = 0; trial < kTrials; ++trial) {
    const SequenceShape shape = {1, kKvHeads, kHeadDim,
                                 trial % 2 == 0 ? DType::kFloat16 : DType::kBFloat16};
    // Many rows, few rows over K/V that is split, and two sequences that the request appends to.
    const auto some = [&](uint32_t n) { return static_cast<uint32_t>(random_() % n); };
    // Together they fit the smallest lane.
    std::vector<SpanShape> spans = {{1 + some(150), some(100), "", {}},
                                    {1 + some(5), 460 + some(100), "", {}},
                                    {1 + some(100), some(60), "new", {}},
                                    {1 + some(3), some(560), "new", {}}};
    std::shuffle(spans.begin(), spans.end(), random_);
    spans.resize(3 + some(2));
    std::vector<std::byte> want;
    auto first = MakeJob(spans, shape.dtype, masks[trial % 3]);
    for (Engine* engine : {engine_.get(), &in_parts}) {
      auto job = MakeJob(spans, shape.dtype, masks[trial % 3]);
      job->query = first->query;
      job->key = first->key;
      job->value = first->value;
      for (SpanShape& span : job->operation.request.spans) {
        if (span.sequence_id.empty()) continue;
        span.sequence_id = engine->sequences().Create(shape, {}, {"alice", {}})->id.ToBytes();
      }
      ASSERT_EQ(testing::Prepare(job.get(), engine), absl::OkStatus());
      ASSERT_EQ(engine->Enqueue(&job->operation), absl::OkStatus());
      ASSERT_EQ(job->ended.get(), absl::OkStatus());
      if (engine == engine_.get()) {
        want = OutputBits(*job);
      } else {
        EXPECT_EQ(OutputBits(*job), want);
      }
    }
  }
  EXPECT_GT(counts.parts, kTrials);
}

// The values of the first part are positive and those of the second negative, so that results
// depend on the LSE.
TEST_P(RealDeviceTest, PartsMergeToTheWhole) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const bool causal : {false, true}) {
      const auto query_rows = static_cast<uint32_t>(1 + random_() % 20);
      const auto kv_rows = static_cast<uint32_t>(100 + random_() % 300);
      const auto somewhere = static_cast<uint32_t>(1 + random_() % (kv_rows - query_rows - 1));
      const kernels::Mask mask = causal ? kernels::Mask::Causal() : kernels::Mask::None();
      bool resident = causal;
      for (const uint32_t split : {0u, kv_rows / 4, somewhere, kv_rows - query_rows}) {
        resident = !resident;
        SCOPED_TRACE(absl::StrCat(query_rows, " query rows, ", kv_rows, " K/V rows, split at ",
                                  split, causal ? ", causal" : ""));
        auto whole = MakeJob({{query_rows, kv_rows, "", {}}}, dtype, mask);
        SetSigns(split, whole.get());
        Submit(whole.get());
        ASSERT_EQ(whole->ended.get(), absl::OkStatus());
        const kernels::AttentionResult want = Reference(*whole);
        EXPECT_EQ(FirstDifference(*whole, want, KernelTolerance(dtype)), "");
        const auto first = AttendToPart(*whole, 0, split, kernels::Mask::None(), resident);
        const auto second = AttendToPart(*whole, split, kv_rows, mask, resident);
        Merge(*first, *second, whole.get());
        EXPECT_EQ(FirstDifference(*whole, want, KernelTolerance(dtype)), "")
            << (resident ? "resident" : "inline");
      }
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
