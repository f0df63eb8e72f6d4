// Requests that the client compressed. gRPC inflates a message before the server sees it, so the
// server's limits hold for what it has become.
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/transport/gated_server.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;

class CompressionTest : public testing::GatedServerTest {
 protected:
  static v1::AttendRequest Request(uint32_t kv_rows) {
    v1::AttendRequest request = testing::StepRequest({""});
    request.mutable_spans(0)->set_kv_rows(kv_rows);
    request.mutable_key()->assign(kv_rows * testing::kRowBytes, '\0');
    request.mutable_value()->assign(kv_rows * testing::kRowBytes, '\0');
    request.set_query(std::string(testing::kRowBytes, 'q'));
    return request;
  }

  grpc::Status AttendCompressed(const v1::AttendRequest& request, v1::AttendResponse* response,
                                grpc_compression_algorithm algorithm = GRPC_COMPRESS_GZIP) {
    grpc::ClientContext context;
    context.set_compression_algorithm(algorithm);
    return stub_->Attend(&context, request, response);
  }
};

TEST_F(CompressionTest, ACompressedRequestGetsTheSameAnswer) {
  StartFake();
  for (const auto algorithm : {GRPC_COMPRESS_GZIP, GRPC_COMPRESS_DEFLATE}) {
    v1::AttendResponse response;
    const grpc::Status status = AttendCompressed(Request(1000), &response, algorithm);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.output(), Request(1000).query());
  }
  EXPECT_TRUE(AllStagingReturns());
}

// A few KiB on the wire.
TEST_F(CompressionTest, AMessageThatIsTooLargeOnceInflatedIsRefused) {
  StartFake();
  const v1::AttendRequest request = Request(10'000);
  ASSERT_GT(request.ByteSizeLong(), testing::ServerOptions().max_message_bytes);
  v1::AttendResponse response;
  const grpc::Status status = AttendCompressed(request, &response);
  EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("vs. 1048576"));
  EXPECT_EQ(gate_.arrived(), 0u);
  EXPECT_TRUE(AttendCompressed(Request(1), &response).ok()) << "the connection lives on";
}

// Staging memory and the memory of those that wait for it count what a message has become.
TEST_F(CompressionTest, StagingMemoryCountsInflatedTensors) {
  const v1::AttendRequest request = Request(7000);
  const size_t inputs =
      StagingPool::SizeClass(request.query().size() + 2 * request.key().size() + 2 * 64);
  const size_t both = inputs + StagingPool::SizeClass(request.query().size());
  Engine::Options engine;
  engine.staging_memory_bytes = both;
  engine.staging_wait = testing::kLong;
  engine.max_waiting_bytes = inputs;  // one request
  StartFake(engine);
  gate_.SetOpen(false);
  const auto send = [&] {
    return std::async(std::launch::async, [&] {
      v1::AttendResponse response;
      return AttendCompressed(request, &response);
    });
  };
  auto running = send();
  EXPECT_TRUE(WaitForArrived(1));
  EXPECT_GT(engine_->staging().used_bytes(), 2 * request.key().size());
  auto waiting = send();
  EXPECT_TRUE(testing::WaitUntil([&] { return engine_->staging().waiting() == 1; }));
  const grpc::Status refused = send().get();
  EXPECT_EQ(refused.error_code(), grpc::RESOURCE_EXHAUSTED) << refused.error_message();
  gate_.SetOpen(true);
  EXPECT_TRUE(running.get().ok());
  EXPECT_TRUE(waiting.get().ok());
  EXPECT_TRUE(AllStagingReturns());
}

TEST_F(CompressionTest, AStreamOfCompressedRequestsIsAnswered) {
  StartFake();
  grpc::ClientContext context;
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  auto stream = stub_->AttendStream(&context);
  constexpr int kRequests = 20;
  std::thread writer([&] {
    for (int i = 0; i < kRequests; ++i) {
      v1::AttendRequest request = Request(1000);
      request.set_request_id(std::to_string(i));
      EXPECT_TRUE(stream->Write(request));
    }
    stream->WritesDone();
  });
  int answered = 0;
  v1::AttendResponse response;
  for (; stream->Read(&response); ++answered) EXPECT_FALSE(response.has_status());
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(answered, kRequests);
}

}  // namespace
}  // namespace flashcore::server
