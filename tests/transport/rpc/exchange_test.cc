// An Exchange and a cancellation that comes before, in, and after the wait for staging memory.
#include "server/transport/rpc/exchange.h"

#include <future>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/transport/grpc/adapters.h"
#include "tests/engine/fakes.h"
#include "tests/transport/rpc_setup.h"

namespace flashcore::server {
namespace {

class ExchangeTest : public ::testing::Test {
 protected:
  ExchangeTest() {
    Engine::Options options;
    options.staging_memory_bytes = 2 * StagingPool::SizeClass(3 * testing::kRowBytes);
    options.staging_wait = 10 * testing::kLong;
    options.max_waiting_bytes = 1 << 20;
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(std::make_unique<testing::FakeDevice>(&device_));
    fleet_ = std::make_unique<Fleet>(options, std::move(devices), &clock_, &metrics_);
  }

  const StagingPool& staging() const { return fleet_->engines()[0]->staging(); }

  // A message on its way to staging memory, and no further.
  struct Reception final : Exchange {
    explicit Reception(ExchangeTest* test)
        : Reception(test, std::make_unique<grpc::ByteBuffer>(
                              ToByteBuffer(testing::StepRequest({""}).SerializeAsString()))) {}
    Reception(ExchangeTest* test, std::unique_ptr<grpc::ByteBuffer> its_message)
        : Exchange({test->fleet_.get(), &test->context_, test->rpc_},
                   ToRequestMessage(its_message.get())),
          message(std::move(its_message)) {}
    ~Reception() override {
      scope_.Replying(absl::OkStatus());
      Record();
    }

    void Receive() {
      bool well_formed = false;
      const absl::Status parsed =
          ParseAttend(message_.view(), /*regions=*/nullptr, &operation_, &tensors_, &well_formed);
      EXPECT_EQ(parsed, absl::OkStatus());
      Exchange::Receive(parsed);
    }
    void Received(const absl::Status& status) override { received.set_value(status); }
    void Complete(const absl::Status& /*status*/) override { ADD_FAILURE() << "it is not queued"; }
    bool ended() { return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }

    const std::unique_ptr<grpc::ByteBuffer> message;
    std::promise<absl::Status> received;  // throws if it is set twice
    std::future<absl::Status> future = received.get_future();
  };

  testing::FakeDeviceControl device_;
  SteadyClock clock_;
  Metrics metrics_{testing::FakeMetricsOptions({{"Service", "Attend", "unary", "grpc", true}})};
  RpcMetrics* const rpc_ = metrics_.Rpc("Service", "Attend");
  ClientConnections client_connections_{0};
  RpcContext context_{&metrics_, &clock_, Authenticator({}, &metrics_), &client_connections_,
                      MakeGrpcAlarm};
  std::unique_ptr<Fleet> fleet_;
};

TEST_F(ExchangeTest, CancelledBeforeTheWaitItEndsAtOnce) {
  Reception first(this), late(this);
  first.Receive();
  EXPECT_EQ(first.future.get(), absl::OkStatus());  // has all memory
  late.Cancel();
  late.Receive();
  ASSERT_TRUE(testing::WaitUntil([&] { return late.ended(); }));
  EXPECT_EQ(late.future.get().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(late.message->Length(), 0u);
  EXPECT_EQ(staging().waiting(), 0u);
}

TEST_F(ExchangeTest, CancelledInTheWaitItLeavesTheLine) {
  Reception first(this), late(this);
  first.Receive();
  EXPECT_EQ(first.future.get(), absl::OkStatus());
  late.Receive();
  EXPECT_EQ(staging().waiting(), 1u);
  EXPECT_FALSE(late.ended());
  EXPECT_GT(late.message->Length(), 0u);  // stays in the network's memory
  late.Cancel();
  ASSERT_TRUE(testing::WaitUntil([&] { return late.ended(); }));
  EXPECT_EQ(late.future.get().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(staging().waiting(), 0u);
}

TEST_F(ExchangeTest, CancelledAfterwardsItHasItsTensors) {
  Reception only(this);
  only.Receive();
  EXPECT_EQ(only.future.get(), absl::OkStatus());
  only.Cancel();
  only.Cancel();
  EXPECT_GT(staging().used_bytes(), 0u);
}

}  // namespace
}  // namespace flashcore::server
