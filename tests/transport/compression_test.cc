// Compressed requests are refused, not inflated: gRPC inflates without a limit.
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "tests/transport/gated_server.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;

class CompressionTest : public testing::GatedServerTest {
 protected:
  static v1::AttendRequest Request() {
    v1::AttendRequest request = testing::StepRequest({""});
    request.mutable_spans(0)->set_kv_rows(1000);
    request.mutable_key()->assign(1000 * testing::kRowBytes, '\0');
    request.mutable_value()->assign(1000 * testing::kRowBytes, '\0');
    request.set_query(std::string(testing::kRowBytes, 'q'));
    return request;
  }
};

TEST_F(CompressionTest, ACompressedRequestIsRefused) {
  StartFake();
  for (const auto& [algorithm, name] :
       {std::pair(GRPC_COMPRESS_GZIP, "gzip"), std::pair(GRPC_COMPRESS_DEFLATE, "deflate")}) {
    grpc::ClientContext context;
    context.set_compression_algorithm(algorithm);
    v1::AttendResponse response;
    const grpc::Status status = stub_->Attend(&context, Request(), &response);
    EXPECT_EQ(status.error_code(), grpc::UNIMPLEMENTED) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(name));
  }
  EXPECT_EQ(gate_.arrived(), 0u);
  grpc::ClientContext context;
  v1::AttendResponse response;
  EXPECT_TRUE(stub_->Attend(&context, Request(), &response).ok()) << "the connection lives on";
  EXPECT_TRUE(AllStagingReturns());
}

TEST_F(CompressionTest, AStreamOfCompressedRequestsIsRefused) {
  StartFake();
  grpc::ClientContext context;
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  auto stream = stub_->AttendStream(&context);
  while (stream->Write(Request())) {
  }
  v1::AttendResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::UNIMPLEMENTED);
  EXPECT_EQ(gate_.arrived(), 0u);
}

}  // namespace
}  // namespace flashcore::server
