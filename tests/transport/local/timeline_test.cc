// Requests that wait for counters in shared memory and raise them, as CUDA streams of a client do.
#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/transport/local/setup.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;
using testing::kPage;
using testing::kRowBytes;
using testing::Memfd;
using testing::WaitUntil;

class LocalTimelineTest : public testing::LocalServerTest {
 protected:
  // Counters of a lane, behind its tensors.
  static constexpr uint64_t kInputs = 60 * kPage;
  static constexpr uint64_t kResults = 61 * kPage;
  static std::atomic<uint64_t>& Counter(const Lane& lane, uint64_t offset) {
    return *reinterpret_cast<std::atomic<uint64_t>*>(lane.memory.data() + offset);
  }
  static void Set(const Lane& lane, uint64_t offset, uint64_t value, v1::TimelinePoint* point) {
    point->set_region_id(lane.region);
    point->set_offset(offset);
    point->set_value(value);
  }
  // A step that waits for `value` of the inputs' counter, and raises the results' counter to it.
  static v1::AttendRequest TimedStep(const Lane& lane, const std::string& sequence,
                                     uint64_t value) {
    v1::AttendRequest step = lane.Step(sequence);
    Set(lane, kInputs, value, step.mutable_inputs_ready());
    Set(lane, kResults, value, step.mutable_results_ready());
    return step;
  }
  static absl::StatusCode Receive(Lane* lane, uint64_t* tag) {
    v1::AttendResponse response;
    EXPECT_TRUE(lane->ring.Receive(tag, &response));
    return static_cast<absl::StatusCode>(response.status().code());
  }
};

TEST_F(LocalTimelineTest, ARequestBeginsWhenItsInputsAreReadyAndKeepsNobodyWaiting) {
  StartLocal();
  Lane lane(path_);
  const std::string sequence = lane.Create();
  lane.ring.Submit(1, TimedStep(lane, sequence, 7));
  lane.ring.Submit(2, lane.Step(sequence));
  uint64_t tag = 0;
  EXPECT_EQ(Receive(&lane, &tag), absl::StatusCode::kOk);
  EXPECT_EQ(tag, 2u) << "a lane runs what is ready";
  EXPECT_EQ(Counter(lane, kResults), 0u);
  // The inputs are read when they are ready: the fake device copies Q to O.
  std::memset(lane.memory.data() + Lane::kTensors, 0x11, kRowBytes);
  Counter(lane, kInputs) = 7;
  EXPECT_EQ(Receive(&lane, &tag), absl::StatusCode::kOk);
  EXPECT_EQ(tag, 1u);
  EXPECT_EQ(Counter(lane, kResults), 7u);
  EXPECT_EQ(lane.memory.data()[Lane::kOutputs], std::byte{0x11});
  EXPECT_EQ(Length(sequence), 2u);
}

// Each waits for the results of the one before, as the layers of a model do.
TEST_F(LocalTimelineTest, AChainIsSubmittedAhead) {
  StartLocal();
  Lane lane(path_);
  const std::string sequence = lane.Create();
  constexpr uint64_t kSteps = 8;
  for (uint64_t i = 1; i <= kSteps; ++i) {
    v1::AttendRequest step = lane.Step(sequence);
    Set(lane, kResults, i - 1, step.mutable_inputs_ready());
    Set(lane, kResults, i, step.mutable_results_ready());
    step.mutable_spans(0)->set_expected_length(i - 1);
    lane.ring.Submit(i, step);
  }
  for (uint64_t i = 1; i <= kSteps; ++i) {
    uint64_t tag = 0;
    EXPECT_EQ(Receive(&lane, &tag), absl::StatusCode::kOk);
    EXPECT_EQ(tag, i);
  }
  EXPECT_EQ(Counter(lane, kResults), kSteps);
  EXPECT_EQ(Length(sequence), kSteps);
}

// A stream that awaits the results must go on, whatever became of them.
TEST_F(LocalTimelineTest, ARequestThatFailsRaisesItsCounter) {
  StartLocal();
  Lane lane(path_);
  const std::string sequence = lane.Create();
  uint64_t value = 0;
  const auto fails = [&](const std::function<void(v1::AttendRequest*)>& spoil,
                         absl::StatusCode code) {
    v1::AttendRequest step = lane.Step(sequence);
    Set(lane, kResults, ++value, step.mutable_results_ready());
    spoil(&step);
    EXPECT_EQ(lane.Attend(step).code(), code);
    EXPECT_EQ(Counter(lane, kResults), value);
  };
  using Request = v1::AttendRequest;
  fails([](Request* step) { step->set_num_heads(0); }, absl::StatusCode::kInvalidArgument);
  fails([](Request* step) { step->set_head_dim(63); }, absl::StatusCode::kInvalidArgument);
  fails([](Request* step) { step->mutable_spans(0)->set_sequence_id(std::string(16, 'x')); },
        absl::StatusCode::kNotFound);
  fails([](Request* step) { step->mutable_query_range()->set_region_id(std::string(16, 'x')); },
        absl::StatusCode::kNotFound);
  fails([](Request* step) { step->mutable_spans(0)->set_expected_length(9); },
        absl::StatusCode::kFailedPrecondition);
  fails([](Request* step) { step->mutable_inputs_ready()->set_region_id("none"); },
        absl::StatusCode::kNotFound);
  fails([](Request* step) { step->GetReflection()->MutableUnknownFields(step)->AddVarint(99, 1); },
        absl::StatusCode::kUnimplemented);
  fake_.SetResult(absl::InternalError("the launch failed"));
  fails([](Request*) {}, absl::StatusCode::kInternal);
}

TEST_F(LocalTimelineTest, ACancelADeadlineAndTheEndOfTheConnectionEndAWait) {
  StartLocal();
  Lane lane(path_);
  const std::string sequence = lane.Create();
  lane.ring.Submit(1, TimedStep(lane, sequence, 1));
  v1::LocalRequest cancel;
  cancel.mutable_cancel()->set_ring(lane.ring.number());
  cancel.mutable_cancel()->set_tag(1);
  cancel.mutable_cancel()->set_in_ring(true);
  cancel.set_id(lane.client.NextId());
  ASSERT_TRUE(lane.client.Send(cancel));
  uint64_t tag = 0;
  EXPECT_EQ(Receive(&lane, &tag), absl::StatusCode::kCancelled);
  lane.ring.Submit(2, TimedStep(lane, sequence, 2), /*timeout_ns=*/1);
  EXPECT_EQ(Receive(&lane, &tag), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Counter(lane, kResults), 0u) << "a stream may still await an earlier request";
  for (const uint64_t value : {1, 2}) {
    Counter(lane, kInputs) = value;
    EXPECT_TRUE(WaitUntil([&] { return Counter(lane, kResults) == value; }));
  }
  {
    Lane other(path_);
    v1::AttendRequest step = TimedStep(other, other.Create(), 1);
    other.ring.Submit(1, step);
    ASSERT_TRUE(WaitUntil([&] { return other.ring.header()->taken == 1; }));
  }
  EXPECT_TRUE(WaitUntil([&] { return metrics_->shared_memory_regions.Value() == 1; }));
  EXPECT_EQ(lane.Attend(lane.Step(sequence)), absl::OkStatus());
  EXPECT_EQ(Length(sequence), 1u) << "none of them took effect";
}

TEST_F(LocalTimelineTest, CallsOfTheSocketHaveThemToo) {
  StartLocal();
  Lane lane(path_);
  const std::string sequence = lane.Create();
  v1::LocalRequest call = CallOf("Attend", TimedStep(lane, sequence, 3));
  call.set_id(lane.client.NextId());
  ASSERT_TRUE(lane.client.Send(call));
  v1::GetServerInfoResponse info;
  call = CallOf("GetServerInfo", v1::GetServerInfoRequest());
  call.set_id(lane.client.NextId());
  ASSERT_TRUE(lane.client.Send(call));
  EXPECT_EQ(lane.client.Receive()->id(), call.id()) << "the other one waits";
  Counter(lane, kInputs) = 3;
  const auto reply = lane.client.Receive();
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->status().code(), 0) << reply->status().message();
  EXPECT_EQ(Counter(lane, kResults), 3u);
}

TEST_F(LocalTimelineTest, RefusesPlacesWithoutACounter) {
  Server::Options options = LocalServerOptions();
  options.device_memory.total_bytes = 4 << 20;
  StartLocal(options);
  Lane lane(path_);
  const std::string sequence = lane.Create();
  const Memfd file(kPage);
  std::string read_only;
  ASSERT_EQ(lane.client.Register(file.fd(), kPage, &read_only, /*read_only=*/true),
            absl::OkStatus());
  v1::LocalRequest allocate;
  allocate.mutable_allocate_device_memory()->set_bytes(1);
  v1::LocalReply allocated;
  ASSERT_EQ(lane.client.Do(allocate, &allocated), absl::OkStatus());
  const uint64_t bytes = lane.memory.bytes();
  struct Case {
    std::string region;
    uint64_t offset;
    const char* why;
  };
  for (const bool inputs : {true, false}) {
    for (const Case& bad : std::vector<Case>{
             {lane.region, 4, "is not a multiple of 8"},
             {lane.region, bytes, "is not a multiple of 8 in 0.."},
             {lane.region, bytes - 4, "is not a multiple of 8"},
             {lane.region, ~uint64_t{7}, "is not a multiple of 8 in 0.."},
             {read_only, 0, "read_only"},
             {allocated.allocate_device_memory().region_id(), 0, "a counter is in host memory"},
             {"", 0, "no such region"}}) {
      v1::AttendRequest step = lane.Step(sequence);
      v1::TimelinePoint& point =
          inputs ? *step.mutable_inputs_ready() : *step.mutable_results_ready();
      point.set_region_id(bad.region);
      point.set_offset(bad.offset);
      const absl::Status status = lane.Attend(step);
      EXPECT_FALSE(status.ok()) << bad.why;
      EXPECT_THAT(std::string(status.message()), HasSubstr(bad.why));
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr(inputs ? "inputs_ready" : "results_ready"));
    }
  }
  // The last counter of a region is one.
  v1::AttendRequest step = lane.Step(sequence);
  Set(lane, bytes - 8, 1, step.mutable_results_ready());
  EXPECT_EQ(lane.Attend(step), absl::OkStatus());
  EXPECT_EQ(Counter(lane, bytes - 8), 1u);
}

TEST_F(LocalTimelineTest, GrpcHasNone) {
  StartLocal();
  v1::AttendRequest request = testing::StepRequest({Create()});
  request.mutable_results_ready()->set_region_id(std::string(16, 'x'));
  const grpc::Status status = Attend(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(status.error_message(), HasSubstr("results_ready: memory is shared over the local"));
}

TEST_F(LocalTimelineTest, ADrainThatRunsOutOfTimeEndsWaits) {
  StartLocal();
  Lane lane(path_);
  lane.ring.Submit(1, TimedStep(lane, lane.Create(), 1));
  ASSERT_TRUE(WaitUntil([&] { return lane.ring.header()->taken == 1; }));
  server_->Drain(absl::Milliseconds(1));
  uint64_t tag = 0;
  EXPECT_EQ(Receive(&lane, &tag), absl::StatusCode::kUnavailable);
}

// Request 2 is refused at once, while request 1 waits: a stream that awaits 1 must not go on.
TEST_F(LocalTimelineTest, ARefusedRequestDoesNotRaiseTheCounterOfTheOneBefore) {
  StartLocal();
  Lane lane(path_);
  lane.ring.Submit(1, TimedStep(lane, lane.Create(), 1));
  v1::AttendRequest bad = TimedStep(lane, std::string(16, 'x'), 2);
  lane.ring.Submit(2, bad);
  uint64_t tag = 0;
  EXPECT_EQ(Receive(&lane, &tag), absl::StatusCode::kNotFound);
  EXPECT_EQ(Counter(lane, kResults), 0u);
  gate_.SetOpen(false);
  Counter(lane, kInputs) = 1;
  ASSERT_TRUE(WaitForArrived(1));
  EXPECT_EQ(Counter(lane, kResults), 0u);
  gate_.SetOpen(true);
  EXPECT_EQ(Receive(&lane, &tag), absl::StatusCode::kOk);
  EXPECT_EQ(Counter(lane, kResults), 1u);
  Counter(lane, kInputs) = 2;
  EXPECT_TRUE(WaitUntil([&] { return Counter(lane, kResults) == 2; }));
}

}  // namespace
}  // namespace flashcore::server
