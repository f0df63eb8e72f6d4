// TensorReceiver and a cancellation that comes before, in, and after the wait for staging memory.
#include "server/transport/tensor_receiver.h"

#include <future>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/fakes.h"
#include "tests/transport/rpc_setup.h"

namespace flashcore::server {
namespace {

class TensorReceiverTest : public ::testing::Test {
 protected:
  TensorReceiverTest() {
    Engine::Options options;
    options.staging_memory_bytes = 2 * StagingPool::SizeClass(3 * testing::kRowBytes);
    options.staging_wait = 10 * testing::kLong;
    options.max_waiting_bytes = 1 << 20;
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(std::make_unique<testing::FakeDevice>(&device_));
    fleet_ = std::make_unique<Fleet>(options, std::move(devices), &clock_, &metrics_);
  }

  const StagingPool& staging() const { return fleet_->engines()[0]->staging(); }

  // A message on its way to staging memory.
  struct Reception {
    explicit Reception(TensorReceiverTest* test)
        : message(Message()), receiver(test->fleet_.get(), test->rpc_, &message, &operation) {}

    static grpc::ByteBuffer Message() {
      const grpc::Slice slice(testing::StepRequest({""}).SerializeAsString());
      return {&slice, 1};
    }
    void Receive() {
      bool well_formed = false;
      const absl::Status parsed =
          ParseAttend(message, nullptr, &operation, &receiver.tensors, &well_formed);
      EXPECT_EQ(parsed, absl::OkStatus());
      receiver.Receive(parsed, [this](const absl::Status& status) { received.set_value(status); });
    }
    bool ended() { return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }

    grpc::ByteBuffer message;
    AttendOperation operation;
    TensorReceiver receiver;
    std::promise<absl::Status> received;  // throws if it is set twice
    std::future<absl::Status> future = received.get_future();
  };

  testing::FakeDeviceControl device_;
  SteadyClock clock_;
  Metrics metrics_{testing::FakeMetricsOptions({{"Service", "Attend", "unary", "grpc", true}})};
  RpcMetrics* const rpc_ = metrics_.Rpc("Service", "Attend");
  std::unique_ptr<Fleet> fleet_;
};

TEST_F(TensorReceiverTest, CancelledBeforeTheWaitItEndsAtOnce) {
  Reception first(this), late(this);
  first.Receive();
  EXPECT_EQ(first.future.get(), absl::OkStatus());  // has all memory
  late.operation.Cancel();
  late.Receive();
  ASSERT_TRUE(testing::WaitUntil([&] { return late.ended(); }));
  EXPECT_EQ(late.future.get().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(late.message.Length(), 0u);
  EXPECT_EQ(staging().waiting(), 0u);
}

TEST_F(TensorReceiverTest, CancelledInTheWaitItLeavesTheLine) {
  Reception first(this), late(this);
  first.Receive();
  EXPECT_EQ(first.future.get(), absl::OkStatus());
  late.Receive();
  EXPECT_EQ(staging().waiting(), 1u);
  EXPECT_FALSE(late.ended());
  EXPECT_GT(late.message.Length(), 0u);  // stays in the network's memory
  late.operation.Cancel();
  ASSERT_TRUE(testing::WaitUntil([&] { return late.ended(); }));
  EXPECT_EQ(late.future.get().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(staging().waiting(), 0u);
}

TEST_F(TensorReceiverTest, CancelledAfterwardsItHasItsTensors) {
  Reception only(this);
  only.Receive();
  EXPECT_EQ(only.future.get(), absl::OkStatus());
  only.operation.Cancel();
  only.operation.Cancel();
  EXPECT_GT(staging().used_bytes(), 0u);
}

}  // namespace
}  // namespace flashcore::server
