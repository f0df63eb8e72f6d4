// The RPCs on resident sequences in this process: what happens to a sequence when a request on it
// fails, waits, or loses its client. On a device that tests can hold at its gate, and on real ones
// what needs no gate.
#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/wire/frames.h"
#include "server/transport/rpc/attention_methods.h"
#include "tests/device/device_setting.h"
#include "tests/transport/gated_server.h"

namespace flashcore::server {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::InfoOf;
using ::testing::IsEmpty;
using testing::kRowBytes;
using ::testing::Not;
using ::testing::Pair;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

class SequenceRpcsTest : public testing::GatedServerTest {
 protected:
  void SetUp() override {
    StartFake();
    sequence_ = Create();
  }

  // Appends one row to the sequence, and one query row attends.
  grpc::Status Step() { return Attend(testing::StepRequest({sequence_})); }
  std::unique_ptr<Call> SendStep() { return Send(testing::StepRequest({sequence_})); }

  v1::ManageSequencesResponse Manage(const v1::ManageSequencesRequest& request) {
    v1::ManageSequencesResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(stub_->ManageSequences(&context, request, &response).ok());
    return response;
  }
  static std::vector<int> Codes(const v1::ManageSequencesResponse& response) {
    std::vector<int> codes;
    for (const v1::SequenceResult& result : response.results()) {
      codes.push_back(result.status().code());
    }
    return codes;
  }

  v1::LoadSequenceRequest Chunk(uint32_t rows, bool first) const {
    v1::LoadSequenceRequest request;
    if (first) request.set_sequence_id(sequence_);
    request.set_layout(v1::LAYOUT_NHD);
    request.set_rows(rows);
    request.set_key(std::string(rows * kRowBytes, '\0'));
    request.set_value(std::string(rows * kRowBytes, '\0'));
    return request;
  }

  uint64_t Length() const { return GatedServerTest::Length(sequence_); }
  [[nodiscard]] bool WaitForLength(uint64_t rows) const {
    return testing::WaitUntil([&] { return Length() == rows; });
  }
  // After this the server has received what was sent on the connection before.
  void RoundTrips() const {
    for (int i = 0; i < 3; ++i) {
      grpc::ClientContext context;
      v1::GetServerInfoResponse response;
      EXPECT_TRUE(stub_->GetServerInfo(&context, {}, &response).ok());
    }
  }

  // A LoadSequence into the sequence.
  struct Load {
    explicit Load(v1::AttentionService::Stub* stub)
        : writer(stub->LoadSequence(&context, &response)) {}

    grpc::ClientContext context;
    v1::LoadSequenceResponse response;
    const std::unique_ptr<grpc::ClientWriter<v1::LoadSequenceRequest>> writer;
  };

  std::string sequence_;
};

TEST_F(SequenceRpcsTest, AStreamStepsInOrderAndIsReadNoFurtherThanItMay) {
  constexpr int kSteps = 12;
  constexpr int kMaxInflight = 4;  // of testing::ServerOptions
  gate_.SetOpen(false);
  grpc::ClientContext context;
  auto stream = stub_->AttendStream(&context);
  for (int i = 0; i < kSteps; ++i) {
    v1::AttendRequest request = testing::StepRequest({sequence_});
    request.set_request_id(std::to_string(i));
    request.mutable_spans(0)->set_expected_length(i);  // fails out of order
    ASSERT_TRUE(stream->Write(request));
  }
  stream->WritesDone();
  EXPECT_TRUE(
      testing::WaitUntil([&] { return metrics_->inflight_requests.Value() >= kMaxInflight; }));
  RoundTrips();  // time to read what it must not
  EXPECT_TRUE(
      testing::WaitUntil([&] { return metrics_->inflight_requests.Value() == kMaxInflight; }));
  gate_.SetOpen(true);
  v1::AttendResponse response;
  for (int i = 0; i < kSteps; ++i) {
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_EQ(response.request_id(), std::to_string(i));
    EXPECT_EQ(response.status().code(), grpc::OK) << response.status().message();
  }
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(Length(), uint64_t{kSteps});
}

TEST_F(SequenceRpcsTest, AFailedLaunchAppendsNothing) {
  fake_.SetResult(absl::InternalError("the device failed"));
  EXPECT_EQ(Step().error_code(), grpc::INTERNAL);
  EXPECT_EQ(Length(), 0u);
  EXPECT_EQ(engine_->sequences().stats().pages, 0u);
  fake_.SetResult(absl::OkStatus());
  EXPECT_TRUE(Step().ok());
  EXPECT_EQ(Length(), 1u);
}

TEST_F(SequenceRpcsTest, ARequestCancelledInTheQueueAppendsNothing) {
  // The server hears of it a little later than the client: the gate stays closed longer and longer,
  // until the server knew before the gate opened.
  for (std::chrono::milliseconds closed(10);; closed *= 2) {
    ASSERT_LT(closed, testing::kLong / 4);
    const uint64_t before = Length();
    const size_t launches = gate_.arrived();
    gate_.SetOpen(false);
    const auto running = SendStep();
    ASSERT_TRUE(WaitForArrived(launches + 1));
    const auto cancelled = SendStep();
    ASSERT_TRUE(WaitForQueued(1));
    cancelled->context.TryCancel();
    EXPECT_EQ(cancelled->status.get().error_code(), grpc::CANCELLED);
    std::this_thread::sleep_for(closed);
    gate_.SetOpen(true);
    EXPECT_TRUE(running->status.get().ok());
    EXPECT_TRUE(Step().ok());  // behind the cancelled one
    if (Length() == before + 2) break;
  }
}

TEST_F(SequenceRpcsTest, ARequestCancelledWhileItRunsStillAppends) {
  gate_.SetOpen(false);
  const auto cancelled = SendStep();
  ASSERT_TRUE(WaitForArrived(1));
  cancelled->context.TryCancel();
  EXPECT_EQ(cancelled->status.get().error_code(), grpc::CANCELLED);
  gate_.SetOpen(true);
  EXPECT_TRUE(WaitForLength(1));
}

TEST_F(SequenceRpcsTest, DeletingASequenceEndsWhatIsQueuedButNotWhatRuns) {
  gate_.SetOpen(false);
  const auto running = SendStep();
  ASSERT_TRUE(WaitForArrived(1));
  const auto queued = SendStep();
  ASSERT_TRUE(WaitForQueued(1));
  v1::DeleteSequenceRequest request;
  request.set_sequence_id(sequence_);
  v1::DeleteSequenceResponse response;
  grpc::ClientContext context;
  EXPECT_TRUE(stub_->DeleteSequence(&context, request, &response).ok());
  gate_.SetOpen(true);
  EXPECT_TRUE(running->status.get().ok());
  const grpc::Status status = queued->status.get();
  EXPECT_EQ(status.error_code(), grpc::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("deleted while the request was queued"));
  EXPECT_EQ(InfoOf(status).reason(), "SEQUENCE_LOST");
  EXPECT_EQ(engine_->sequences().stats().pages, 0u);
}

// With the limit of metadata that clients have by default.
TEST_F(SequenceRpcsTest, ManyLostSequencesAreNamedInCallsAndStreams) {
  std::vector<std::string> ids;
  for (int i = 0; i < 200; ++i) ids.push_back(SequenceId::Random().ToBytes());
  v1::AttendRequest request = testing::StepRequest(ids);
  request.set_request_id("many");
  v1::AttendResponse response;
  grpc::ClientContext context;
  const grpc::Status refused = stub_->Attend(&context, request, &response);
  EXPECT_EQ(refused.error_code(), grpc::NOT_FOUND);
  EXPECT_THAT(refused.error_message(), HasSubstr(" and 196 more, 200 in all: no such sequence"));
  const v1::ErrorInfo info = InfoOf(refused);
  EXPECT_EQ(info.reason(), "SEQUENCE_LOST");
  EXPECT_EQ(info.domain(), "flashcore");
  EXPECT_EQ(info.metadata().at("lost"), "200");
  EXPECT_THAT(info.metadata().at("sequence_ids"), StartsWith(absl::BytesToHexString(ids[0]) + ","));

  grpc::ClientContext stream_context;
  const auto stream = stub_->AttendStream(&stream_context);
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.status().message(), refused.error_message());
  EXPECT_EQ(InfoOf(response.status()).metadata().at("spans"), info.metadata().at("spans"));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(SequenceRpcsTest, AppendsAndTruncatesTellTheLength) {
  ASSERT_TRUE(Step().ok());
  v1::LoadSequenceRequest chunk = Chunk(1, true);
  chunk.set_expected_length(7);
  const Load load(stub_.get());
  load.writer->Write(chunk);
  load.writer->WritesDone();
  v1::TruncateSequenceRequest truncate;
  truncate.set_sequence_id(sequence_);
  truncate.set_expected_length(7);
  v1::TruncateSequenceResponse truncated;
  grpc::ClientContext context;
  for (const grpc::Status& status :
       {load.writer->Finish(), stub_->TruncateSequence(&context, truncate, &truncated)}) {
    EXPECT_EQ(status.error_code(), grpc::FAILED_PRECONDITION);
    const v1::ErrorInfo info = InfoOf(status);
    EXPECT_EQ(info.reason(), "LENGTH_MISMATCH");
    EXPECT_THAT(info.metadata(),
                UnorderedElementsAre(Pair("sequence_id", absl::BytesToHexString(sequence_)),
                                     Pair("expected", "7"), Pair("actual", "1")));
  }
}

TEST_F(SequenceRpcsTest, ALoadReceivesOneChunkAhead) {
  gate_.SetOpen(false);
  Load load(stub_.get());
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(load.writer->Write(Chunk(1, i == 0)));
  ASSERT_TRUE(WaitForArrived(1));
  RoundTrips();
  // The one that runs and the one that waits for it; each takes the smallest buffer.
  EXPECT_LE(engine_->staging().used_bytes(), 2 * StagingPool::SizeClass(1));
  gate_.SetOpen(true);
  load.writer->WritesDone();
  EXPECT_TRUE(load.writer->Finish().ok());
  EXPECT_THAT(load.response.sequence().layer_lengths(), ElementsAre(8));
  EXPECT_TRUE(AllStagingReturns());
}

TEST_F(SequenceRpcsTest, AStepOfBeamSearchIsOneCall) {
  const std::string loser = Create();
  ASSERT_TRUE(Step().ok());
  v1::ManageSequencesRequest request;
  for (int i = 0; i < 2; ++i) request.add_operations()->mutable_fork()->set_sequence_id(sequence_);
  request.add_operations()->mutable_truncate()->set_sequence_id(sequence_);
  request.add_operations()->mutable_get()->set_sequence_id(sequence_);
  request.add_operations()->mutable_delete_()->set_sequence_id(loser);
  *request.add_operations()->mutable_create() = testing::CreateRequest();
  const v1::ManageSequencesResponse response = Manage(request);
  EXPECT_THAT(Codes(response), Each(grpc::OK));
  std::vector<std::vector<uint64_t>> lengths;
  std::set<std::string> ids;
  for (const v1::SequenceResult& result : response.results()) {
    const auto& layers = result.sequence().layer_lengths();
    lengths.emplace_back(layers.begin(), layers.end());
    ids.insert(result.sequence().sequence_id());
  }
  EXPECT_THAT(lengths, ElementsAre(ElementsAre(1), ElementsAre(1), ElementsAre(0), ElementsAre(0),
                                   IsEmpty(), ElementsAre(0)));
  EXPECT_EQ(ids.size(), 5u);  // two forks, the sequence itself, none, and the new one
  EXPECT_EQ(engine_->sequences().stats().sequences, 4u);
  EXPECT_FALSE(response.results(4).has_sequence());
}

TEST_F(SequenceRpcsTest, AnOperationThatFailsStopsOnlyThoseOnItsSequence) {
  const std::string other = Create();
  v1::ManageSequencesRequest request;
  v1::ForkSequenceRequest* fork = request.add_operations()->mutable_fork();
  fork->set_sequence_id(sequence_);
  fork->set_length(1);
  request.add_operations()->mutable_delete_()->set_sequence_id(sequence_);
  request.add_operations()->mutable_delete_()->set_sequence_id(other);
  request.add_operations()->mutable_get()->set_sequence_id(other);
  request.add_operations()->mutable_get()->set_sequence_id("short");
  request.add_operations();
  request.add_operations()->mutable_create();
  *request.add_operations()->mutable_create() = testing::CreateRequest();
  const v1::ManageSequencesResponse response = Manage(request);
  EXPECT_THAT(Codes(response),
              ElementsAre(grpc::INVALID_ARGUMENT, grpc::ABORTED, grpc::OK, grpc::NOT_FOUND,
                          grpc::INVALID_ARGUMENT, grpc::INVALID_ARGUMENT, grpc::INVALID_ARGUMENT,
                          grpc::OK));
  EXPECT_THAT(response.results(0).status().message(), HasSubstr("layer 0 has only 0 rows"));
  EXPECT_EQ(response.results(0).status().details_size(), 0);
  EXPECT_EQ(InfoOf(response.results(3).status()).metadata().at("sequence_ids"),
            absl::BytesToHexString(other));
  EXPECT_FALSE(response.results(0).has_sequence());
  EXPECT_EQ(Length(), 0u);  // it is there
  EXPECT_EQ(engine_->sequences().stats().sequences, 2u);
}

// A kind of operation that the contract has and the server does not run fails here.
TEST_F(SequenceRpcsTest, EveryOperationOfTheContractRuns) {
  const auto* kinds = v1::SequenceOperation::descriptor()->oneof_decl(0);
  v1::ManageSequencesRequest request;
  for (int i = 0; i < kinds->field_count(); ++i) {
    v1::SequenceOperation* operation = request.add_operations();
    operation->GetReflection()->MutableMessage(operation, kinds->field(i));
  }
  const v1::ManageSequencesResponse response = Manage(request);
  for (const v1::SequenceResult& result : response.results()) {
    EXPECT_EQ(result.status().code(), grpc::INVALID_ARGUMENT);  // of the empty request
    EXPECT_THAT(result.status().message(), Not(HasSubstr("unknown to this server")));
  }
}

TEST_F(SequenceRpcsTest, ManyOperationsAreLimited) {
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
  const int most = static_cast<int>(info.limits().max_sequence_operations());
  EXPECT_EQ(most, 256);
  v1::ManageSequencesRequest request;
  for (int i = 0; i < most; ++i) request.add_operations()->mutable_create();
  EXPECT_EQ(Manage(request).results_size(), most);
  *request.add_operations()->mutable_create() = testing::CreateRequest();
  grpc::ClientContext again;
  v1::ManageSequencesResponse response;
  EXPECT_EQ(stub_->ManageSequences(&again, request, &response).error_code(),
            grpc::INVALID_ARGUMENT);
  EXPECT_EQ(engine_->sequences().stats().sequences, 1u);
  EXPECT_EQ(Manage({}).results_size(), 0);
}

// The reply fits in a frame of the local socket, and what was not answered has no effect.
TEST_F(SequenceRpcsTest, OperationsBeyondALargeReplyAreRefused) {
  v1::ManageSequencesRequest request;
  for (int i = 0; i < AttentionMethods::kMaxSequenceOperations; ++i) {
    v1::CreateSequenceRequest* create = request.add_operations()->mutable_create();
    *create = testing::CreateRequest();
    create->set_num_layers(1024);
  }
  const v1::ManageSequencesResponse response = Manage(request);
  EXPECT_LT(response.ByteSizeLong(), wire::kMaxFrameBytes / 2);
  const std::vector<int> codes = Codes(response);
  const auto refused = std::find(codes.begin(), codes.end(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_NE(refused, codes.end());
  EXPECT_THAT(std::vector<int>(codes.begin(), refused), Each(grpc::OK));
  EXPECT_THAT(std::vector<int>(refused, codes.end()), Each(grpc::RESOURCE_EXHAUSTED));
  EXPECT_EQ(engine_->sequences().stats().sequences,
            1 + static_cast<size_t>(refused - codes.begin()));
}

class SequenceRpcsOnDeviceTest : public SequenceRpcsTest,
                                 public ::testing::WithParamInterface<testing::DeviceSetting> {
 protected:
  void SetUp() override {
    if (const std::string why = GetParam().why_none(); !why.empty()) GTEST_SKIP() << why;
    Start(GetParam().make(size_t{8} << 20, 0, clock_));
    sequence_ = Create();
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, SequenceRpcsOnDeviceTest,
                         ::testing::ValuesIn(testing::RealDevices()),
                         [](const auto& param) { return param.param.name; });

TEST_P(SequenceRpcsOnDeviceTest, AChunkThatFailsEndsTheLoadBeforeTheNextIsAppended) {
  Load load(stub_.get());
  v1::LoadSequenceRequest wrong = Chunk(5, false);
  wrong.set_expected_length(9);
  load.writer->Write(Chunk(5, true));
  load.writer->Write(wrong);
  load.writer->Write(Chunk(5, false));
  load.writer->WritesDone();
  const grpc::Status status = load.writer->Finish();
  EXPECT_EQ(status.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("the sequence has 5 rows in layer 0"));
  EXPECT_EQ(Length(), 5u);
}

TEST_P(SequenceRpcsOnDeviceTest, ACancelledLoadLeavesWholeChunks) {
  Load load(stub_.get());
  ASSERT_TRUE(load.writer->Write(Chunk(70, true)));
  EXPECT_TRUE(WaitForLength(70));
  load.context.TryCancel();
  EXPECT_EQ(load.writer->Finish().error_code(), grpc::CANCELLED);
  EXPECT_TRUE(Step().ok());
  EXPECT_EQ(Length(), 71u);
}

TEST_P(SequenceRpcsOnDeviceTest, ADrainEndsAnOpenLoad) {
  Load load(stub_.get());
  ASSERT_TRUE(load.writer->Write(Chunk(3, true)));
  EXPECT_TRUE(WaitForLength(3));
  EXPECT_TRUE(server_->Drain(absl::FromChrono(testing::kLong)));
  EXPECT_EQ(load.writer->Finish().error_code(), grpc::UNAVAILABLE);
  EXPECT_EQ(Length(), 3u);
}

}  // namespace
}  // namespace flashcore::server
