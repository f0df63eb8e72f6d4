// The C interface where there is no driver of a GPU, and where it is too old. CMakeLists.txt sets
// the path where the library looks for one.
#include <atomic>
#include <string>

#include "flashcore/c.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_local_server.h"

namespace flashcore {
namespace {

constexpr int kUnimplemented = 12;
constexpr int64_t kTimeout = 60'000'000'000;

// Both functions say why, and nothing is sent for them.
void ExpectUnimplemented(const std::string& why) {
  FakeLocalServer server;
  std::atomic<int> requests{0};
  server.on_request = [&](const v1::LocalRequest&, v1::LocalReply*) {
    ++requests;
    return false;
  };
  flashcore_client* client = nullptr;
  ASSERT_EQ(flashcore_connect(server.target().c_str(), "test", nullptr, &client), FLASHCORE_OK);
  const int of_connecting = requests;
  flashcore_device_memory memory;
  EXPECT_EQ(flashcore_allocate_device_memory(client, 1, "", kTimeout, &memory), kUnimplemented);
  EXPECT_THAT(flashcore_last_error(), testing::HasSubstr(why));
  EXPECT_EQ(flashcore_submit_on_stream(client, 1, nullptr, 0, kTimeout, nullptr), kUnimplemented);
  EXPECT_THAT(flashcore_last_error(), testing::HasSubstr(why));
  EXPECT_EQ(server.submitted(), 0u);
  flashcore_completion completion;  // the rest works
  EXPECT_EQ(flashcore_submit(client, 1, nullptr, 0, kTimeout), FLASHCORE_OK);
  EXPECT_EQ(flashcore_wait(client, kTimeout, &completion), FLASHCORE_OK);
  flashcore_bytes response;  // requests are read in order
  EXPECT_EQ(flashcore_call(client, "GetServerInfo", nullptr, 0, kTimeout, &response),
            kUnimplemented);
  EXPECT_EQ(requests, of_connecting + 1);
  flashcore_close(client);
}

TEST(NoDriver, IsUnimplemented) { ExpectUnimplemented("need the driver of an NVIDIA GPU: "); }

TEST(OldDriver, IsUnimplemented) {
  ExpectUnimplemented(": device memory and CUDA streams need a driver of CUDA 12.0 or later");
}

}  // namespace
}  // namespace flashcore
