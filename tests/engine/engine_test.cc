#include "server/engine/engine.h"

#include <chrono>
#include <future>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/kv/operation.h"
#include "tests/engine/fakes.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using testing::FakeClock;
using testing::FakeDevice;
using testing::FakeDeviceControl;
using ::testing::HasSubstr;
using testing::MakeRequest;

// An operation and its status.
struct Client {
  AttendOperation operation;
  std::promise<absl::Status> promise;
  std::future<absl::Status> ended = promise.get_future();

  explicit Client(AttendRequest request = MakeRequest()) {
    operation.request = std::move(request);
    operation.identity.name = "alice";
    operation.done = [this](absl::Status status) { promise.set_value(std::move(status)); };
  }
};

constexpr SequenceShape kShape = {1, 1, 32, kernels::DType::kFloat16};

// A request that appends `rows` rows to a sequence and attends to it.
AttendRequest AppendTo(SequenceId id, uint32_t rows, std::optional<uint64_t> expected_length = {}) {
  AttendRequest request = MakeRequest(1, 1, 1, 1, kShape.head_dim);
  testing::SetSpans({{1, rows, id.ToBytes(), expected_length}}, &request);
  return request;
}

class EngineTest : public ::testing::Test {
 protected:
  void Start(Engine::Options options = {}) {
    options.sequences.superblock_bytes = kShape.page_bytes();
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

  absl::Status Run(AttendRequest request) {
    Client client(std::move(request));
    absl::Status status = Submit(&client);
    return status.ok() ? client.ended.get() : status;
  }

  SequenceId CreateSequence() {
    return engine_->sequences().Create(kShape, {false}, {"alice", {}})->id;
  }
  // Expects that all calls which tell the length agree, and returns it.
  uint64_t Length(SequenceId id) {
    const uint64_t length = engine_->sequences().Get(id, {"alice", {}})->layer_lengths[0];
    for (const SequenceInfo& info : engine_->sequences().List({"alice", {}}, 0, {100}).sequences) {
      EXPECT_TRUE(!(info.id == id) || info.layer_lengths[0] == length);
    }
    return length;
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

TEST_F(EngineTest, HousekeepingGivesMemoryThatNobodyNeedsBackToTheDevice) {
  Start();
  const SequenceId id = CreateSequence();
  ASSERT_EQ(Run(AppendTo(id, 130)), absl::OkStatus());
  ASSERT_EQ(engine_->sequences().Delete(id, {"alice", {}}), absl::OkStatus());
  clock_.Advance(Arena::kKeepEmpty);
  device_.WaitUntilGivenBack(3 * kShape.page_bytes());
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

TEST_F(EngineTest, ADisplacedRequestEndsAndLeavesNothing) {
  device_.SetOpen(false);
  Engine::Options options;
  options.batcher.max_queue_requests = 2;
  Start(options);
  const SequenceId id = CreateSequence();
  Client running, waiting, displaced(AppendTo(id, 3)), newcomer;
  ASSERT_EQ(Submit(&running), absl::OkStatus());
  device_.WaitUntilEntered(1);
  const size_t used_bytes = engine_->staging().used_bytes();
  ASSERT_EQ(Submit(&waiting), absl::OkStatus());
  ASSERT_EQ(Submit(&displaced), absl::OkStatus());
  newcomer.operation.identity.name = "another";
  ASSERT_EQ(Submit(&newcomer), absl::OkStatus());

  // It has ended before anything else can happen: the lane is still busy.
  if (displaced.ended.wait_for(std::chrono::seconds(0)) == std::future_status::ready) {
    const absl::Status status = displaced.ended.get();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(status.message()), HasSubstr("made room for another client's"));
  } else {
    ADD_FAILURE() << "the displaced request has not ended";
  }
  EXPECT_EQ(engine_->load(), 3);
  EXPECT_EQ(metrics_.queue_depth.Value(), 2);
  displaced.operation.tensors.TakeResults();
  EXPECT_EQ(engine_->staging().used_bytes(), 3 * used_bytes);
  clock_.Advance(std::chrono::seconds(1));
  EXPECT_EQ(engine_->sequences().Get(id, {"alice", {}})->idle, std::chrono::seconds(1))
      << "it keeps its lease";
  EXPECT_EQ(Length(id), 0u);
  device_.SetOpen(true);
  for (Client* client : {&running, &waiting, &newcomer}) {
    EXPECT_EQ(client->ended.get(), absl::OkStatus());
  }
}

// ---- Fairness: the lane takes one request at a time, so the order of the ends shows the turns.

class EngineTurnsTest : public EngineTest {
 protected:
  void Start() {
    device_.SetOpen(false);
    Engine::Options options;
    options.batcher.max_batch_requests = 1;
    EngineTest::Start(options);
    ASSERT_EQ(Submit(&first_), absl::OkStatus());
    device_.WaitUntilEntered(1);
  }
  void Add(const std::string& name, int requests, uint32_t query_rows, uint32_t kv_rows = 1000) {
    for (; requests > 0; --requests) {
      Client& client = clients_.emplace_back(MakeRequest(query_rows, kv_rows));
      client.operation.identity.name = name;
      client.operation.done = [this, name, &client](const absl::Status& status) {
        ends_ += name;  // on the only lane's thread
        client.promise.set_value(status);
      };
      ASSERT_EQ(Submit(&client), absl::OkStatus());
    }
  }
  // The names of the clients, in the order in which their requests end.
  std::string Ends() {
    device_.SetOpen(true);
    EXPECT_EQ(first_.ended.get(), absl::OkStatus());
    for (Client& client : clients_) EXPECT_EQ(client.ended.get(), absl::OkStatus());
    return ends_;
  }

  Client first_;  // keeps the lane busy
  std::list<Client> clients_;
  std::string ends_;
};

TEST_F(EngineTurnsTest, AClientWithFewRequestsDoesNotWaitForOneWithMany) {
  Start();
  Add("a", 20, 1);
  Add("b", 4, 1);
  EXPECT_EQ(Ends(), "abababab" + std::string(16, 'a'));
}

TEST_F(EngineTurnsTest, TurnsCountWork) {
  Start();
  Add("p", 3, 10);  // prefills
  Add("d", 25, 1);  // decodes
  EXPECT_EQ(Ends(),
            "p" + std::string(10, 'd') + "p" + std::string(10, 'd') + "p" + std::string(5, 'd'));
}

TEST_F(EngineTurnsTest, WorkGrowsWithTheKv) {
  Start();
  Add("l", 3, 1, 5000);  // one query row each, over long and over short K/V
  Add("s", 12, 1);
  EXPECT_EQ(Ends(), "lssssslssssslss");
}

// ---- What a client may rely on when it retries an append.

class EngineRetryTest : public EngineTest {
 protected:
  EngineRetryTest() { Start(); }

  // Expects that the first attempt, which appended `rows` rows to an empty sequence, took effect:
  // its retry is refused, says so, and changes nothing.
  void ExpectTookEffect(SequenceId id, uint32_t rows) {
    EXPECT_EQ(Length(id), rows);
    const absl::Status retry = Run(AppendTo(id, rows, 0));
    EXPECT_EQ(retry.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(retry.message()),
                HasSubstr("the sequence has " + std::to_string(rows) + " rows"));
    EXPECT_EQ(Length(id), rows);
  }
  // Expects that it took no effect: its retry does, once.
  void ExpectTookNoEffect(SequenceId id, uint32_t rows) {
    EXPECT_EQ(Length(id), 0u);
    EXPECT_EQ(Run(AppendTo(id, rows, 0)), absl::OkStatus());
    ExpectTookEffect(id, rows);
  }
};

TEST_F(EngineRetryTest, ADeadlineInTheMiddleOfALaunchLeavesTheAppend) {
  const SequenceId id = CreateSequence();
  device_.SetOpen(false);
  Client client(AppendTo(id, 70, 0));
  client.operation.deadline = clock_.Now() + std::chrono::milliseconds(1);
  ASSERT_EQ(Submit(&client), absl::OkStatus());
  device_.WaitUntilEntered(1);
  clock_.Advance(std::chrono::milliseconds(2));
  EXPECT_EQ(Length(id), 0u) << "rows are visible before the launch has ended";
  device_.SetOpen(true);
  EXPECT_EQ(client.ended.get(), absl::OkStatus());
  EXPECT_THAT(client.operation.sequence_lengths, ElementsAre(70));
  ExpectTookEffect(id, 70);
}

TEST_F(EngineRetryTest, AClientThatLeavesInTheMiddleOfALaunchLeavesTheAppend) {
  const SequenceId id = CreateSequence();
  device_.SetOpen(false);
  Client client(AppendTo(id, 70, 0));
  ASSERT_EQ(Submit(&client), absl::OkStatus());
  device_.WaitUntilEntered(1);
  client.operation.Cancel();
  device_.SetOpen(true);
  EXPECT_EQ(client.ended.get(), absl::OkStatus());
  ExpectTookEffect(id, 70);
}

TEST_F(EngineRetryTest, ADeadlineInTheQueueHasNoEffect) {
  const SequenceId id = CreateSequence();
  device_.SetOpen(false);
  Client running, expiring(AppendTo(id, 70, 0)), after_it(AppendTo(id, 1, 70));
  ASSERT_EQ(Submit(&running), absl::OkStatus());
  device_.WaitUntilEntered(1);
  expiring.operation.deadline = clock_.Now() + std::chrono::milliseconds(1);
  ASSERT_EQ(Submit(&expiring), absl::OkStatus());
  ASSERT_EQ(Submit(&after_it), absl::OkStatus());
  clock_.Advance(std::chrono::milliseconds(1));
  device_.SetOpen(true);
  EXPECT_EQ(running.ended.get(), absl::OkStatus());
  EXPECT_EQ(expiring.ended.get().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(after_it.ended.get().code(), absl::StatusCode::kFailedPrecondition);
  ExpectTookNoEffect(id, 70);
}

TEST_F(EngineRetryTest, ALaunchThatFailsHasNoEffect) {
  const SequenceId id = CreateSequence();
  device_.SetResult(absl::InternalError("launch failed"));
  EXPECT_EQ(Run(AppendTo(id, 70, 0)).code(), absl::StatusCode::kInternal);
  device_.SetResult(absl::OkStatus());
  ExpectTookNoEffect(id, 70);
}

// ---- The device and the end.

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
