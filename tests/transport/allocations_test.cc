// How much heap a request takes once the server has warmed up.
#include <cstdio>
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "grpcpp/create_channel.h"
#include "gtest/gtest.h"
#include "proto/grpc/grpc_compat.h"
#include "tests/bench/echo_servers.h"
#include "tests/transport/byte_path_fixture.h"
#include "tests/transport/counted_memory.h"

namespace flashcore::server {
namespace {

using ::flashcore::testing::Allocations;
using ::flashcore::testing::AllocationsSoFar;

struct PerRequest {
  double count = 0;
  double bytes = 0;
};

class AllocationsTest : public testing::BytePathTest {
 protected:
  // After as many calls again to warm up.
  PerRequest Measure(const char* name, const std::function<void()>& request) {
    constexpr int kRequests = 300;
    for (int i = 0; i < kRequests; ++i) request();
    EXPECT_TRUE(AllStagingReturns());
    const Allocations before = AllocationsSoFar();
    for (int i = 0; i < kRequests; ++i) request();
    EXPECT_TRUE(AllStagingReturns());
    const Allocations after = AllocationsSoFar();
    const PerRequest out = {double(after.count - before.count) / kRequests,
                            double(after.bytes - before.bytes) / kRequests};
    std::printf("%-28s %7.1f allocations, %9.0f bytes a request\n", name, out.count, out.bytes);
    return out;
  }

  // From the message to the reply, without gRPC.
  PerRequest MeasureOurs(const char* name, const v1::AttendRequest& request) {
    const grpc::Slice bytes(request.SerializeAsString());
    const grpc::ByteBuffer original(&bytes, 1);
    return Measure(name, [&] {
      grpc::ByteBuffer message(original);  // one allocation, counted with ours
      Serve(&message);
    });
  }

  // Server, client and gRPC between them, of an Attend to the server at `address`.
  PerRequest MeasureRpc(const std::string& name, const std::string& address,
                        const std::string& request) {
    const grpc::Slice slice(request);
    const grpc::ByteBuffer message(&slice, 1);
    const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
    return Measure(name.c_str(), [&] {
      grpc::ClientContext context;
      grpc::ByteBuffer reply;
      EXPECT_TRUE(
          grpc_compat::CallUnary(channel.get(), bench::kEchoMethod, &context, message, &reply)
              .ok());
    });
  }

  // One query row over each of `spans` resident sequences of 64 rows, or with `appends` of 64 rows
  // and those that it appends.
  v1::AttendRequest Decode(int spans = 1, bool appends = false) {
    v1::AttendRequest request = Inline(64);
    request.clear_spans();
    for (int i = 0; i < spans; ++i) {
      auto info = fleet_->Create({1, kHeads, kHeadDim, kernels::DType::kFloat16},
                                 {/*pin=*/false, /*shared=*/!appends}, {}, "");
      EXPECT_EQ(info.status(), absl::OkStatus());
      v1::AttendRequest load = Inline(64);
      load.mutable_spans(0)->set_sequence_id(info->id.ToBytes());
      const grpc::Slice bytes(load.SerializeAsString());
      grpc::ByteBuffer message(&bytes, 1);
      Serve(&message);
      v1::Span* span = request.add_spans();
      span->set_query_rows(1);
      span->set_kv_rows(appends ? 1 : 0);
      span->set_sequence_id(info->id.ToBytes());
    }
    const size_t bytes = static_cast<size_t>(spans) * kTokenBytes;
    request.mutable_query()->resize(bytes);
    request.mutable_key()->resize(appends ? bytes : 0);
    request.mutable_value()->resize(appends ? bytes : 0);
    return request;
  }
};

TEST_F(AllocationsTest, OursAreFewWhateverTheSizeOfTheTensors) {
  server_.reset();  // its threads allocate
  constexpr double kMost = 30;
  const PerRequest small = MeasureOurs("ours, inline 1 row", Inline(1));
  const PerRequest mission = MeasureOurs("ours, inline 512 rows", Inline(512));
  const PerRequest decode = MeasureOurs("ours, decode, resident", Decode());
  EXPECT_LE(small.count, kMost);
  EXPECT_LE(decode.count, kMost);
  EXPECT_NEAR(mission.count, small.count, 1);
  EXPECT_NEAR(mission.bytes, small.bytes, 200);
  const PerRequest again = MeasureOurs("ours, inline 1 row, again", Inline(1));
  EXPECT_NEAR(again.count, small.count, 1);
}

// A step over many sequences takes no heap for each of them, but longer lists. Now and then one
// that appends lists a page more.
TEST_F(AllocationsTest, OursDoNotGrowWithTheSpans) {
  server_.reset();  // its threads allocate
  const PerRequest one = MeasureOurs("ours, decode of 1, appends", Decode(1, true));
  const PerRequest some = MeasureOurs("ours, decode of 8, appends", Decode(8, true));
  EXPECT_LE(some.count, one.count + 5);
  const PerRequest read_one = MeasureOurs("ours, decode of 1", Decode(1));
  const PerRequest read_many = MeasureOurs("ours, decode of 64", Decode(64));
  EXPECT_LE(read_many.count, read_one.count + 8);
}

TEST_F(AllocationsTest, OfAWholeRpcBesideAnEchoOfTheSameSizes) {
  constexpr double kMost = 40;  // more than the echo
  const auto echo = bench::StartCallbackServer({});
  ASSERT_NE(echo, nullptr);
  v1::AttendRequest decode = Decode();
  for (const auto& [name, request] : {std::pair{"512 rows", Inline(512)}, {"decode", decode}}) {
    const std::string bytes = request.SerializeAsString();
    const PerRequest base =
        MeasureRpc(absl::StrCat("echo of ", name), absl::StrCat("127.0.0.1:", echo->port),
                   bench::EchoRequest(bytes.size(), request.query().size()));
    const PerRequest attend =
        MeasureRpc(absl::StrCat("Attend, ", name), server_->addresses()[0], bytes);
    EXPECT_LE(attend.count, base.count + kMost);
  }
}

}  // namespace
}  // namespace flashcore::server
