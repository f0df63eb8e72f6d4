// The C++ client where there is no driver of a GPU, and where it is too old: see c_driver_test.cc.
#include <string>

#include "flashcore/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_local_server.h"

namespace flashcore {
namespace {

void ExpectUnimplemented(const std::string& why) {
  const FakeLocalServer server;
  const auto client = Client::Create(server.target()).value();
  const absl::Status allocated = client->AllocateDeviceMemory(1).status();
  EXPECT_EQ(allocated.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(allocated.message(), testing::HasSubstr(why));

  const auto memory = client->CreateSharedMemory(4096).value();
  AttendRequest request;
  request.spans = {{1, 0}};
  request.num_heads = request.num_kv_heads = 1;
  request.head_dim = 8;
  request.query = {memory->data(), request.QueryBytes()};
  request.output = {memory->data() + 1024, request.QueryBytes()};
  absl::Status attended;
  client->AttendOnCudaStream(request, nullptr, [&](const absl::Status& status, AttendResult) {
    attended = status;  // before the call returns
  });
  EXPECT_EQ(attended.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(attended.message(), testing::HasSubstr(why));
  EXPECT_EQ(server.submitted(), 0u);
  EXPECT_EQ(client->Attend(request, nullptr), absl::OkStatus()) << "the rest works";
}

TEST(NoDriver, IsUnimplementedInCpp) { ExpectUnimplemented("need the driver of an NVIDIA GPU: "); }

TEST(OldDriver, IsUnimplementedInCpp) {
  ExpectUnimplemented(": device memory and CUDA streams need a driver of CUDA 12.0 or later");
}

}  // namespace
}  // namespace flashcore
