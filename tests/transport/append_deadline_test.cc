// A deadline that passes around an append, as a client sees it: the status, and the retry with the
// same expected_length that the contract calls safe.
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "flashcore/client.h"
#include "gmock/gmock.h"
#include "tests/transport/gated_server.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;

class AppendDeadlineTest : public testing::GatedServerTest {
 protected:
  void SetUp() override {
    StartFake();
    ClientOptions options;
    options.timeout = absl::FromChrono(testing::kLong);
    client_ = Client::Create(server_->addresses()[0], options).value();
    flashcore::SequenceOptions shape;
    shape.num_kv_heads = 1;
    shape.head_dim = testing::kHeadDim;
    sequence_ = client_->CreateSequence(shape).value();
  }

  // Appends one row, and one query row attends.
  absl::Status Step(uint64_t expected_length, std::optional<absl::Duration> timeout = {}) {
    flashcore::AttendRequest request;
    request.spans = {{1, 1, {}, expected_length}};
    request.num_heads = 1;
    std::vector<std::byte> output(testing::kRowBytes);
    request.query = request.key = request.value = row_;
    request.output = absl::MakeSpan(output);
    CallOptions call;
    if (timeout.has_value()) call.deadline = absl::Now() + *timeout;
    return sequence_->Attend(request, nullptr, call);
  }
  uint64_t rows() const { return Length(sequence_->id()); }

  // A step whose deadline passes while its launch is at the closed gate. Longer and longer
  // deadlines, until the launch begins before the deadline.
  void StepPastItsDeadline() {
    const size_t before = gate_.arrived();
    for (absl::Duration timeout = absl::Milliseconds(100);; timeout *= 2) {
      ASSERT_LT(timeout, absl::FromChrono(testing::kLong));
      const absl::Status status = Step(0, timeout);
      ASSERT_TRUE(absl::IsDeadlineExceeded(status)) << status;
      if (gate_.arrived() > before) return;
      // Late, but it may still arrive. The server drops it unless a lane has taken it.
      ASSERT_TRUE(testing::WaitUntil(
          [&] { return gate_.arrived() > before || metrics_->inflight_requests.Value() == 0; }));
      if (gate_.arrived() > before) return;
    }
  }

  const std::vector<std::byte> row_ = std::vector<std::byte>(testing::kRowBytes);
  std::unique_ptr<Client> client_;
  std::optional<flashcore::Sequence> sequence_;
};

TEST_F(AppendDeadlineTest, InTheMiddleOfALaunchTheAppendTakesEffectOnce) {
  gate_.SetOpen(false);
  StepPastItsDeadline();
  // The client retries while the first attempt still runs: the retry waits for it.
  auto retry = std::async(std::launch::async, [&] { return Step(0); });
  EXPECT_TRUE(WaitForQueued(1));
  gate_.SetOpen(true);
  const absl::Status status = retry.get();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the sequence has 1 rows in layer 0"));
  EXPECT_EQ(rows(), 1u);
  EXPECT_EQ(Step(1), absl::OkStatus());
  EXPECT_EQ(rows(), 2u);
  EXPECT_TRUE(AllStagingReturns());
}

TEST_F(AppendDeadlineTest, InTheMiddleOfALaunchThatFailsTheRetryAppends) {
  gate_.SetOpen(false);
  StepPastItsDeadline();
  fake_.SetResult(absl::InternalError("the device failed"));
  gate_.PassOne();
  EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->inflight_requests.Value() == 0; }));
  EXPECT_EQ(rows(), 0u);
  fake_.SetResult(absl::OkStatus());
  gate_.SetOpen(true);
  EXPECT_EQ(Step(0), absl::OkStatus());
  EXPECT_EQ(rows(), 1u);
}

// The server's deadline is a little later than the client's. In these two tests the gate stays
// closed longer and longer, until the deadline of the queued request had passed on the server as
// well.
TEST_F(AppendDeadlineTest, InTheQueueNothingIsAppendedAndTheRetryIs) {
  for (std::chrono::milliseconds closed(10);; closed *= 2) {
    ASSERT_LT(closed, testing::kLong / 4);
    const uint64_t before = rows();
    const size_t arrived = gate_.arrived();
    gate_.SetOpen(false);
    auto running = std::async(std::launch::async, [&] { return Step(before); });
    EXPECT_TRUE(WaitForArrived(arrived + 1));
    const absl::Status late = Step(before + 1, absl::Milliseconds(50));  // behind the one that runs
    EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
    std::this_thread::sleep_for(closed);
    gate_.SetOpen(true);
    EXPECT_EQ(running.get(), absl::OkStatus());
    const absl::Status retry = Step(before + 1);
    EXPECT_EQ(rows(), before + 2);  // one of the two attempts
    if (retry.ok()) break;
    EXPECT_TRUE(absl::IsFailedPrecondition(retry)) << retry;
  }
}

TEST_F(AppendDeadlineTest, OfAStreamTheLaunchedAppendTakesEffectAndTheQueuedDoesNot) {
  for (std::chrono::milliseconds closed(10);; closed *= 2) {
    ASSERT_LT(closed, testing::kLong / 4);
    const uint64_t before = rows();
    const size_t arrived = gate_.arrived();
    gate_.SetOpen(false);
    grpc::ClientContext context;
    const auto deadline =
        std::chrono::system_clock::now() + std::chrono::milliseconds(100) + closed;
    context.set_deadline(deadline);
    auto stream = stub_->AttendStream(&context);
    for (uint64_t i = 0; i < 2; ++i) {
      v1::AttendRequest request = testing::StepRequest({sequence_->id()});
      request.set_request_id(std::to_string(i));
      request.mutable_spans(0)->set_expected_length(before + i);
      stream->Write(request);
      // One launch would take both if it had not begun.
      EXPECT_TRUE(testing::WaitUntil([&] {
        return gate_.arrived() > arrived || std::chrono::system_clock::now() > deadline;
      }));
    }
    v1::AttendResponse response;
    EXPECT_FALSE(stream->Read(&response));
    EXPECT_EQ(stream->Finish().error_code(), grpc::DEADLINE_EXCEEDED);
    std::this_thread::sleep_for(closed);
    gate_.SetOpen(true);
    EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->inflight_requests.Value() == 0; }));
    if (rows() == before + 1) {
      EXPECT_TRUE(absl::IsFailedPrecondition(Step(before)));
      EXPECT_EQ(Step(before + 1), absl::OkStatus());
      break;
    }
  }
}

TEST_F(AppendDeadlineTest, OfALoadLeavesWholeChunks) {
  gate_.SetOpen(false);
  v1::LoadSequenceRequest chunk;
  chunk.set_sequence_id(sequence_->id());
  chunk.set_layout(v1::LAYOUT_NHD);
  chunk.set_rows(3);
  chunk.set_key(std::string(3 * testing::kRowBytes, '\0'));
  chunk.set_value(chunk.key());
  chunk.set_expected_length(0);
  for (std::chrono::milliseconds timeout(200);; timeout *= 2) {
    ASSERT_LT(timeout, testing::kLong);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + timeout);
    v1::LoadSequenceResponse response;
    auto writer = stub_->LoadSequence(&context, &response);
    writer->Write(chunk);
    EXPECT_EQ(writer->Finish().error_code(), grpc::DEADLINE_EXCEEDED);
    ASSERT_TRUE(testing::WaitUntil(
        [&] { return gate_.arrived() > 0 || metrics_->inflight_requests.Value() == 0; }));
    if (gate_.arrived() > 0) break;
  }
  gate_.SetOpen(true);
  EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->inflight_requests.Value() == 0; }));
  EXPECT_EQ(rows(), 3u);
  const std::vector<std::byte> row(testing::kRowBytes);
  EXPECT_TRUE(absl::IsFailedPrecondition(
      sequence_->Append(0, row, row, flashcore::Layout::kNHD, 0).status()));
  EXPECT_TRUE(sequence_->Append(0, row, row, flashcore::Layout::kNHD, 3).ok());
}

}  // namespace
}  // namespace flashcore::server
