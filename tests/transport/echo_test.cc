// DebugService: Echo and EchoStream on a real server.
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "flashcore/v1/debug.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "gtest/gtest.h"
#include "server/engine/fleet.h"
#include "tests/engine/fakes.h"
#include "tests/transport/rpc_setup.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;

constexpr size_t kMaxReplyBytes = 1 << 20;

class EchoTest : public ::testing::Test {
 protected:
  using Stream = grpc::ClientReaderWriter<v1::EchoRequest, v1::EchoResponse>;

  void SetUp() override { Start(/*enable_echo=*/true); }

  void Start(bool enable_echo) {
    server_.reset();
    Server::Options options = testing::ServerOptions();
    options.max_message_bytes = kMaxReplyBytes;
    options.enable_echo = enable_echo;
    metrics_ = std::make_unique<Metrics>(testing::FakeMetricsOptions(Server::Methods(options)));
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(std::make_unique<testing::FakeDevice>(&device_));
    fleet_ =
        std::make_unique<Fleet>(Engine::Options(), std::move(devices), &clock_, metrics_.get());
    auto server = Server::Start(options, fleet_.get(), metrics_.get());
    ASSERT_EQ(server.status(), absl::OkStatus());
    server_ = *std::move(server);
    stub_ = v1::DebugService::NewStub(
        grpc::CreateChannel(server_->addresses()[0], grpc::InsecureChannelCredentials()));
    context_ = std::make_unique<grpc::ClientContext>();
    context_->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  }
  void TearDown() override {
    stub_.reset();
    server_.reset();
    fleet_.reset();
  }

  static v1::EchoRequest Request(const std::string& id, size_t payload, size_t reply) {
    v1::EchoRequest request;
    request.set_request_id(id);
    request.set_payload(std::string(payload, 'p'));
    request.set_reply_bytes(reply);
    return request;
  }

  testing::FakeDeviceControl device_;
  SteadyClock clock_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<Fleet> fleet_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<v1::DebugService::Stub> stub_;
  std::unique_ptr<grpc::ClientContext> context_;
};

TEST_F(EchoTest, RepliesWithAsManyBytesAsAskedFor) {
  v1::EchoResponse response;
  ASSERT_TRUE(stub_->Echo(context_.get(), Request("id", 5000, 70000), &response).ok());
  EXPECT_EQ(response.request_id(), "id");
  EXPECT_EQ(response.payload().size(), 70000u);
}

// More requests than the stream may have unanswered, all written before the first reply is read.
// The replies are larger than what gRPC sends ahead, so that answers queue.
TEST_F(EchoTest, AStreamAnswersEachRequestInOrder) {
  auto stream = stub_->EchoStream(context_.get());
  constexpr size_t kRequests = 20, kReplyBytes = 500'000;
  for (size_t i = 0; i < kRequests; ++i) {
    EXPECT_TRUE(stream->Write(Request(absl::StrCat(i), 1000, kReplyBytes + i)));
  }
  stream->WritesDone();
  v1::EchoResponse response;
  for (size_t i = 0; i < kRequests; ++i) {
    ASSERT_TRUE(stream->Read(&response)) << i;
    EXPECT_EQ(response.request_id(), absl::StrCat(i));
    EXPECT_EQ(response.payload().size(), kReplyBytes + i);
  }
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(EchoTest, ARequestThatEchoRefusesEndsTheStreamAfterTheAnswersBeforeIt) {
  auto stream = stub_->EchoStream(context_.get());
  EXPECT_TRUE(stream->Write(Request("good", 10, 20)));
  EXPECT_TRUE(stream->Write(Request("too long", 10, kMaxReplyBytes + 1)));
  v1::EchoResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.request_id(), "good");
  EXPECT_FALSE(stream->Read(&response));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("reply_bytes: 1048577"));

  grpc::ClientContext context;
  EXPECT_EQ(stub_->Echo(&context, Request("", 10, kMaxReplyBytes + 1), &response).error_message(),
            status.error_message());
}

TEST_F(EchoTest, ADrainEndsOpenStreamsAndRefusesNewOnes) {
  auto stream = stub_->EchoStream(context_.get());
  EXPECT_TRUE(stream->Write(Request("before", 10, 20)));
  v1::EchoResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_TRUE(server_->Drain(absl::Seconds(30)));
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::UNAVAILABLE);
  grpc::ClientContext context;
  auto late = stub_->EchoStream(&context);
  EXPECT_FALSE(late->Read(&response));
  EXPECT_EQ(late->Finish().error_code(), grpc::UNAVAILABLE);
}

TEST_F(EchoTest, ACancelledStreamLeavesNothingBehind) {
  auto stream = stub_->EchoStream(context_.get());
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(stream->Write(Request("r", 10, kMaxReplyBytes)));
  context_->TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::CANCELLED);
  stream.reset();
  // A drain ends only when every admitted RPC has ended.
  EXPECT_TRUE(server_->Drain(absl::Seconds(30)));
}

TEST_F(EchoTest, IsServedOnlyIfEnabled) {
  Start(/*enable_echo=*/false);
  v1::EchoResponse response;
  EXPECT_EQ(stub_->Echo(context_.get(), Request("", 1, 1), &response).error_code(),
            grpc::UNIMPLEMENTED);
  grpc::ClientContext context;
  EXPECT_EQ(stub_->EchoStream(&context)->Finish().error_code(), grpc::UNIMPLEMENTED);
}

}  // namespace
}  // namespace flashcore::server
