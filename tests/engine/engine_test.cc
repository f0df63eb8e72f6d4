#include "server/engine/engine.h"

#include <chrono>
#include <future>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/fakes.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using testing::FakeClock;
using testing::FakeDevice;
using testing::FakeDeviceControl;
using testing::MakeRequest;

// An operation and its status.
struct Client {
  AttendOperation operation;
  std::promise<absl::Status> promise;
  std::future<absl::Status> ended = promise.get_future();

  explicit Client(AttendRequest request = MakeRequest()) {
    operation.request = std::move(request);
    operation.done = [this](absl::Status status) { promise.set_value(std::move(status)); };
  }
};

class EngineTest : public ::testing::Test {
 protected:
  void Start(Engine::Options options = {}) {
    engine_ = std::make_unique<Engine>(options, std::make_unique<FakeDevice>(&device_), &clock_,
                                       &metrics_);
  }
  absl::Status Submit(Client* client) {
    if (absl::Status status = testing::AdmitNow(engine_.get(), &client->operation); !status.ok()) {
      return status;
    }
    std::memset(client->operation.tensors.query(), 0x5a, client->operation.request.query_bytes);
    return engine_->Enqueue(&client->operation);
  }

  FakeDeviceControl device_;
  FakeClock clock_;
  MetricRegistry registry_;
  DeviceMetrics metrics_{"fake", &registry_};
  std::unique_ptr<Engine> engine_;
};

TEST_F(EngineTest, RunsARequest) {
  Start();
  Client client;
  ASSERT_EQ(Submit(&client), absl::OkStatus());
  EXPECT_EQ(client.ended.get(), absl::OkStatus());
  EXPECT_EQ(client.operation.tensors.output()[0], std::byte{0x5a});
  client.operation.tensors.TakeResults();
  EXPECT_EQ(engine_->staging().used_bytes(), 0u);
}

TEST_F(EngineTest, RefusesWhatDoesNotValidateAndLendsNothing) {
  Start();
  Client client;
  client.operation.request.query_bytes++;
  EXPECT_EQ(Submit(&client).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(engine_->staging().used_bytes(), 0u);
}

TEST_F(EngineTest, RefusesWhenStagingMemoryIsFull) {
  Engine::Options options;
  options.staging_memory_bytes = 4096;  // inputs fit, results do not
  Start(options);
  Client client;
  EXPECT_EQ(Submit(&client).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_->staging().used_bytes(), 0u);
}

TEST_F(EngineTest, WaitingRequestsOfOneGeometryRunAsOneBatch) {
  device_.SetOpen(false);
  Start();
  Client first;
  std::vector<std::unique_ptr<Client>> waiting;
  ASSERT_EQ(Submit(&first), absl::OkStatus());
  device_.WaitUntilEntered(1);
  for (int i = 0; i < 5; ++i) {
    waiting.push_back(std::make_unique<Client>());
    ASSERT_EQ(Submit(waiting.back().get()), absl::OkStatus());
  }
  device_.SetOpen(true);
  EXPECT_EQ(first.ended.get(), absl::OkStatus());
  for (auto& client : waiting) EXPECT_EQ(client->ended.get(), absl::OkStatus());
  EXPECT_THAT(device_.BatchSizes(), ElementsAre(1, 5));
}

TEST_F(EngineTest, ALaneRunsOneBatchAtATime) {
  device_.SetOpen(false);
  Start();
  Client first;
  std::vector<std::unique_ptr<Client>> waiting;
  ASSERT_EQ(Submit(&first), absl::OkStatus());
  device_.WaitUntilEntered(1);
  for (uint32_t heads = 1; heads <= 6; ++heads) {  // geometries that do not share a batch
    waiting.push_back(std::make_unique<Client>(MakeRequest(1, 1, heads)));
    ASSERT_EQ(Submit(waiting.back().get()), absl::OkStatus());
  }
  device_.SetOpen(true);
  EXPECT_EQ(first.ended.get(), absl::OkStatus());
  for (auto& client : waiting) EXPECT_EQ(client->ended.get(), absl::OkStatus());
  EXPECT_EQ(device_.MostUnderWay(), 1u);
  EXPECT_THAT(device_.BatchSizes(), ElementsAre(1, 1, 1, 1, 1, 1, 1));
}

TEST_F(EngineTest, QueueFullDeadlineAndCancellation) {
  device_.SetOpen(false);
  Engine::Options options;
  options.batcher.max_queue_requests = 2;
  Start(options);
  Client running, expiring, cancelled, refused;
  running.operation.deadline = expiring.operation.deadline =
      clock_.Now() + std::chrono::milliseconds(1);
  ASSERT_EQ(Submit(&running), absl::OkStatus());
  device_.WaitUntilEntered(1);
  ASSERT_EQ(Submit(&expiring), absl::OkStatus());
  ASSERT_EQ(Submit(&cancelled), absl::OkStatus());
  EXPECT_EQ(Submit(&refused).code(), absl::StatusCode::kResourceExhausted);
  clock_.Advance(std::chrono::milliseconds(2));
  cancelled.operation.cancelled = true;
  device_.SetOpen(true);
  EXPECT_EQ(running.ended.get(), absl::OkStatus());  // had been launched in time
  EXPECT_EQ(expiring.ended.get().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(cancelled.ended.get().code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(device_.BatchSizes(), ElementsAre(1));
}

TEST_F(EngineTest, ADeviceErrorEndsEveryRequestOfTheBatch) {
  device_.SetResult(absl::InternalError("launch failed"));
  Start();
  Client a, b;
  ASSERT_EQ(Submit(&a), absl::OkStatus());
  EXPECT_EQ(a.ended.get(), absl::InternalError("launch failed"));
  device_.SetResult(absl::OkStatus());
  ASSERT_EQ(Submit(&b), absl::OkStatus());
  EXPECT_EQ(b.ended.get(), absl::OkStatus());
}

TEST_F(EngineTest, DestructionEndsEveryQueuedRequest) {
  device_.SetOpen(false);
  Start();
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 20; ++i) {
    clients.push_back(std::make_unique<Client>());
    ASSERT_EQ(Submit(clients.back().get()), absl::OkStatus());
  }
  engine_->Close();
  Client late;
  EXPECT_EQ(Submit(&late).code(), absl::StatusCode::kUnavailable);
  late.operation.tensors = {};
  device_.SetOpen(true);
  for (auto& client : clients) {
    EXPECT_EQ(client->ended.get(), absl::OkStatus());
    client->operation.tensors.TakeResults();
  }
  engine_.reset();
}

}  // namespace
}  // namespace flashcore::server
