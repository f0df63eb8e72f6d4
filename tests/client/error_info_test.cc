// GetErrorInfo of everything that has a status over gRPC. local_client_test.cc has the local
// socket.
#include "flashcore/error_info.h"

#include <memory>
#include <string>
#include <vector>

#include "flashcore/client.h"
#include "gmock/gmock.h"
#include "grpcpp/support/status.h"
#include "gtest/gtest.h"
#include "tests/client/error_status.h"
#include "tests/client/fake_server.h"
#include "tests/client/request_fixture.h"

namespace flashcore {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

class ErrorInfoTest : public ::testing::Test {
 protected:
  void ExpectKvFull(const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(status.message(), "text");
    const ErrorInfo info = GetErrorInfo(status);
    EXPECT_EQ(info.reason, "KV_FULL");
    EXPECT_THAT(info.metadata, ElementsAre(Pair("free_bytes", "4096")));
  }
  absl::Status Attend() {
    RequestFixture r;
    return client_->Attend(r.request, nullptr);
  }

  const v1::Status full_ =
      StatusWithInfo(absl::StatusCode::kResourceExhausted, "KV_FULL", "free_bytes", "4096");
  FakeServer server_;
  std::unique_ptr<Client> client_ = *Client::Create(server_.target());
};

TEST_F(ErrorInfoTest, OfCallsAndStreams) {
  server_.on_attend = [this](auto*, const auto&, auto*) { return ToGrpc(full_); };
  ExpectKvFull(Attend());

  server_.on_create = [this](auto*, const auto&, auto*) { return ToGrpc(full_); };
  ExpectKvFull(client_->CreateSequence({1, 1, 8}).status());

  server_.on_stream = [this](FakeServer::Stream* stream) {
    v1::AttendRequest request;
    stream->Read(&request);
    v1::AttendResponse response;
    response.set_request_id(request.request_id());
    *response.mutable_status() = full_;
    stream->Write(response);
    stream->Read(&request);
    return ToGrpc(full_);
  };
  auto stream = client_->OpenStream();
  RequestFixture r("id");
  ASSERT_EQ(stream->Send(r.request), absl::OkStatus());
  AttendStream::Answer answer;
  ASSERT_TRUE(stream->Receive(&answer));
  ExpectKvFull(answer.status);
  ExpectKvFull(stream->Finish());
}

TEST_F(ErrorInfoTest, OfOperationsOfManageSequences) {
  server_.on_manage = [this](auto*, const auto&, v1::ManageSequencesResponse* response) {
    *response->add_results()->mutable_status() = full_;
    return grpc::Status::OK;
  };
  const auto results = client_->ManageSequences({SequenceOperation::Create({1, 1, 8})});
  ASSERT_TRUE(results.ok()) << results.status();
  ExpectKvFull((*results)[0].sequence.status());
}

TEST_F(ErrorInfoTest, OthersHaveNone) {
  EXPECT_EQ(GetErrorInfo(absl::OkStatus()).reason, "");
  EXPECT_EQ(GetErrorInfo(absl::NotFoundError("text")).reason, "");
  std::string details;
  server_.on_attend = [&](auto*, const auto&, auto*) {
    return grpc::Status(grpc::StatusCode::NOT_FOUND, "text", details);
  };
  EXPECT_EQ(Attend(), absl::NotFoundError("text"));
  details = "not a status";
  EXPECT_EQ(Attend(), absl::NotFoundError("text"));
  v1::Status foreign = full_;
  v1::ErrorInfo info;
  info.set_reason("QUOTA");
  info.set_domain("proxy.example");
  foreign.mutable_details(0)->set_value(info.SerializeAsString());
  details = foreign.SerializeAsString();
  const absl::Status status = Attend();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << "the code is that of the RPC";
  EXPECT_EQ(GetErrorInfo(status).reason, "");
  EXPECT_THAT(GetErrorInfo(status).metadata, IsEmpty());
}

}  // namespace
}  // namespace flashcore
