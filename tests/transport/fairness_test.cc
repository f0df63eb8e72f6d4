// Two clients over gRPC, of which one floods the server: the other is served in its turn.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/transport/gated_server.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;

constexpr int kFlood = 100;

class FairnessTest : public testing::GatedServerTest {
 protected:
  // One request a launch, so that the order of the launches is that of the turns.
  static Engine::Options OneByOne() {
    Engine::Options options;
    options.batcher.max_batch_requests = 1;
    return options;
  }
  void SetUp() override {
    Server::Options options = testing::ServerOptions();
    options.max_stream_inflight = 2 * kFlood;
    StartFake(OneByOne(), options);
  }

  // A stream whose requests are not read. Cancelled with the flood.
  struct Flood {
    ~Flood() {
      context.TryCancel();
      stream->Finish();
    }
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::AttendRequest, v1::AttendResponse>> stream;
  };
  // Closes the gate. One request of the flood is at it, the others are in the queue.
  std::unique_ptr<Flood> StartFlood() {
    gate_.SetOpen(false);
    auto flood = std::make_unique<Flood>();
    flood->context.AddMetadata("flashcore-client", "flood");
    flood->stream = stub_->AttendStream(&flood->context);
    for (int i = 0; i <= kFlood; ++i) {
      v1::AttendRequest request = testing::StepRequest({""});
      request.set_request_id(std::to_string(i));
      EXPECT_TRUE(flood->stream->Write(request));
    }
    EXPECT_TRUE(WaitForQueued(kFlood));
    return flood;
  }

  // Lets one launch pass, and waits until the next one is at the gate.
  void PassOne() {
    const size_t before = gate_.arrived();
    gate_.PassOne();
    EXPECT_TRUE(WaitForArrived(before + 1));
  }

  static bool IsOf(const std::vector<std::string>& launch, const std::string& client) {
    return launch.size() == 1 && launch[0].find(client) != std::string::npos;
  }
};

TEST_F(FairnessTest, RequestsBehindAFloodTakeTurnsWithIt) {
  constexpr size_t kPolite = 10;
  const auto flood = StartFlood();
  std::vector<std::unique_ptr<Call>> polite;
  for (size_t i = 0; i < kPolite; ++i) {
    polite.push_back(Send(testing::StepRequest({""}), "polite"));
  }
  EXPECT_TRUE(WaitForQueued(kFlood + kPolite));
  gate_.SetOpen(true);
  for (const auto& call : polite) EXPECT_TRUE(call->status.get().ok());
  size_t of_flood = 0, of_polite = 0;
  for (const auto& launch : gate_.launches()) {
    if (of_polite == kPolite) break;
    ++(IsOf(launch, "polite") ? of_polite : of_flood);
    // One launch of the flood was at the gate before the others came; then they alternate.
    EXPECT_LE(of_flood, of_polite + 2);
  }
  EXPECT_EQ(of_polite, kPolite);
}

// The polite client sends its next request when it has the answer to the last.
TEST_F(FairnessTest, OneRequestAtATimeWaitsForTwoLaunchesOfAFlood) {
  const auto flood = StartFlood();
  for (int i = 0; i < 10; ++i) {
    const int queued = engine_->queued();  // one more is at the gate
    const auto call = Send(testing::StepRequest({""}), "polite");
    EXPECT_TRUE(WaitForQueued(queued + 1));
    int of_flood = 0;
    for (; of_flood < 2 && !IsOf(gate_.launches().back(), "polite"); ++of_flood) PassOne();
    ASSERT_TRUE(IsOf(gate_.launches().back(), "polite")) << "step " << i;
    PassOne();
    EXPECT_TRUE(call->status.get().ok());
  }
  gate_.SetOpen(true);
}

TEST_F(FairnessTest, AFullQueueMakesRoomForAnotherClientAndSaysSo) {
  server_.reset();
  fleet_.reset();
  Engine::Options engine = OneByOne();
  engine.batcher.max_queue_requests = 8;
  StartFake(engine);
  gate_.SetOpen(false);
  std::vector<std::unique_ptr<Call>> flood;
  flood.push_back(Send(testing::StepRequest({""}), "flood"));
  EXPECT_TRUE(WaitForArrived(1));
  for (int i = 1; i <= 8; ++i) {
    flood.push_back(Send(testing::StepRequest({""}), "flood"));
    EXPECT_TRUE(WaitForQueued(i));
  }
  const auto more = Send(testing::StepRequest({""}), "flood");
  EXPECT_EQ(more->status.get().error_code(), grpc::RESOURCE_EXHAUSTED);

  const auto polite = Send(testing::StepRequest({""}), "polite");
  // The newest request of the flood makes room. It is answered at once, at the closed gate.
  ASSERT_TRUE(WaitForEnd(*flood.back()));
  const grpc::Status displaced = flood.back()->status.get();
  EXPECT_EQ(displaced.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_THAT(displaced.error_message(), HasSubstr("queue is full"));
  flood.pop_back();
  gate_.SetOpen(true);
  EXPECT_TRUE(polite->status.get().ok());
  for (const auto& call : flood) EXPECT_TRUE(call->status.get().ok());
  EXPECT_TRUE(AllStagingReturns());
}

}  // namespace
}  // namespace flashcore::server
