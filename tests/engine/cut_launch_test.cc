// Operations with more work than one launch may have.
#include "server/kv/cut_launch.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "server/kv/operation.h"
#include "tests/engine/fakes.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using testing::FakeClock;
using testing::FakeDevice;
using testing::FakeDeviceControl;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr SequenceShape kShape = {1, 1, 64, kernels::DType::kFloat16};

// Work of a tile of 128 packed rows over 1,000 K/V rows, on a device of 10^12 FLOP/s.
constexpr Nanoseconds kTileWork(33'000);
constexpr int kTiles = 8;

struct Client {
  explicit Client(std::string name, AttendRequest request) {
    operation.identity.name = std::move(name);
    operation.request = std::move(request);
    operation.done = [this](absl::Status status) { promise.set_value(std::move(status)); };
  }
  bool ended_now() const {
    return ended.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }

  AttendOperation operation;
  std::promise<absl::Status> promise;
  std::future<absl::Status> ended = promise.get_future();
};

AttendRequest Small() { return testing::MakeRequest(1, 100); }
// kTiles tiles, two packed rows for each query row.
AttendRequest Long() { return testing::MakeRequest(64 * kTiles, 1000); }
const Identity kOwner = {"x", {}};

AttendRequest On(AttendRequest request, SequenceId id) {
  request.spans[0].sequence_id = id.ToBytes();
  return request;
}

class CutLaunchTest : public ::testing::Test {
 protected:
  void Start(int max_tiles = 1) {
    Engine::Options options;
    options.sequences.superblock_bytes = size_t{1} << 18;
    options.batcher.max_launch = max_tiles * kTileWork;
    engine_ = std::make_unique<Engine>(options, std::make_unique<FakeDevice>(&device_), &clock_,
                                       &metrics_);
  }
  absl::Status Submit(Client* client) {
    if (absl::Status status = testing::AdmitNow(engine_.get(), &client->operation); !status.ok()) {
      return status;
    }
    if (client->operation.request.query_bytes > 0) {
      std::memset(client->operation.tensors.query(), 0x5a, client->operation.request.query_bytes);
    }
    return engine_->Enqueue(&client->operation);
  }
  // Submits with the gate closed, and waits until the first part is at the gate.
  void SubmitToGate(Client* client) {
    device_.SetOpen(false);
    ASSERT_EQ(Submit(client), absl::OkStatus());
    device_.WaitUntilEntered(++entered_);
  }
  void PassOne() {
    device_.PassOne();
    device_.WaitUntilEntered(++entered_);
  }
  SequenceId CreateSequence() {
    SequenceSettings settings;
    settings.shared = true;
    return engine_->sequences().Create(kShape, settings, kOwner)->id;
  }
  uint64_t Length(SequenceId id) { return engine_->sequences().Get(id, kOwner)->layer_lengths[0]; }

  // Expects that an append took no effect: the sequence is as before, and can be appended to.
  void ExpectRolledBack(SequenceId id) {
    EXPECT_EQ(Length(id), 0u);
    EXPECT_EQ(engine_->sequences().stats().pages, 0u);
    device_.SetOpen(true);
    Client retry("x", On(Long(), id));
    retry.operation.request.spans[0].expected_length = 0;
    ASSERT_EQ(Submit(&retry), absl::OkStatus());
    EXPECT_EQ(retry.ended.get(), absl::OkStatus());
    EXPECT_EQ(Length(id), 1000u);
    EXPECT_EQ(metrics_.queue_depth.Value(), 0);
    EXPECT_EQ(engine_->load(), 0);
  }

  FakeDeviceControl device_;
  FakeClock clock_;
  MetricRegistry registry_;
  DeviceMetrics metrics_{"fake", &registry_};
  int entered_ = 0;
  std::unique_ptr<Engine> engine_;
};

TEST(CutLaunchPartsTest, TheWorkThatIsLeftShrinks) {
  AttendOperation operation;
  operation.work = Nanoseconds(30);
  CutLaunch cut;
  cut.launch.operations = {&operation};
  cut.parts.resize(3);
  cut.part_work = Nanoseconds(10);
  ASSERT_TRUE(cut.Next());
  EXPECT_EQ(operation.work, Nanoseconds(20));
  ASSERT_TRUE(cut.Next());
  EXPECT_EQ(operation.work, Nanoseconds(10));
  EXPECT_FALSE(cut.Next());
}

TEST_F(CutLaunchTest, ALongRequestRunsInParts) {
  Start();
  const SequenceId id = CreateSequence();
  Client client("x", On(Long(), id));
  ASSERT_EQ(Submit(&client), absl::OkStatus());
  EXPECT_EQ(client.ended.get(), absl::OkStatus());
  EXPECT_THAT(device_.BatchSizes(), SizeIs(kTiles));
  EXPECT_THAT(device_.Appends(), ElementsAre(16, 0, 0, 0, 0, 0, 0, 0)) << "pages, in the first";
  EXPECT_EQ(client.operation.times.kernel, kTiles * std::chrono::microseconds(1));
  EXPECT_EQ(client.operation.cut, nullptr);
  EXPECT_EQ(Length(id), 1000u);
  EXPECT_THAT(client.operation.sequence_lengths, ElementsAre(1000));
  client.operation.tensors.TakeResults();
  EXPECT_EQ(engine_->staging().used_bytes(), 0u);
  EXPECT_EQ(metrics_.queue_depth.Value(), 0);
}

TEST_F(CutLaunchTest, AShortRequestDoesNot) {
  Start(kTiles);
  Client client("x", Long());
  ASSERT_EQ(Submit(&client), absl::OkStatus());
  EXPECT_EQ(client.ended.get(), absl::OkStatus());
  EXPECT_THAT(device_.BatchSizes(), ElementsAre(1));
}

TEST_F(CutLaunchTest, OtherClientsRunBetweenTheParts) {
  Start();
  Client long_one("x", Long()), another("x", Long());
  SubmitToGate(&long_one);
  ASSERT_EQ(Submit(&another), absl::OkStatus());
  for (int i = 0; i < 3; ++i) {
    Client small("y", Small());
    ASSERT_EQ(Submit(&small), absl::OkStatus());
    PassOne();
    EXPECT_EQ(device_.Clients().back(), "y") << "it waits for one part";
    PassOne();
    EXPECT_EQ(small.ended.get(), absl::OkStatus());
    EXPECT_EQ(device_.Clients().back(), "x");
  }
  EXPECT_FALSE(long_one.ended_now());
  device_.SetOpen(true);
  EXPECT_EQ(long_one.ended.get(), absl::OkStatus());
  EXPECT_EQ(another.ended.get(), absl::OkStatus());
}

TEST_F(CutLaunchTest, WaitsBetweenPartsAreTimeInTheQueue) {
  using std::chrono::milliseconds;
  Start();
  Client long_one("x", Long()), another("y", Small());
  SubmitToGate(&long_one);
  clock_.Advance(milliseconds(1));  // of the first part
  ASSERT_EQ(Submit(&another), absl::OkStatus());
  PassOne();
  EXPECT_EQ(device_.Clients().back(), "y");
  clock_.Advance(milliseconds(7));
  PassOne();
  EXPECT_EQ(device_.Clients().back(), "x");
  clock_.Advance(milliseconds(2));  // of the second
  device_.SetOpen(true);
  EXPECT_EQ(long_one.ended.get(), absl::OkStatus());
  EXPECT_EQ(long_one.operation.times.queue, Nanoseconds(milliseconds(7)));
  EXPECT_EQ(another.operation.times.queue, Nanoseconds(0));
}

TEST_F(CutLaunchTest, LongRequestsOfTwoClientsTakeTurns) {
  Start();
  Client first("x", Long()), second("y", Long()), third("x", Long());
  SubmitToGate(&first);
  ASSERT_EQ(Submit(&second), absl::OkStatus());
  ASSERT_EQ(Submit(&third), absl::OkStatus());
  device_.SetOpen(true);
  for (Client* client : {&first, &second, &third}) EXPECT_EQ(client->ended.get(), absl::OkStatus());
  int of_x = 0, of_y = 0;
  for (const std::string& client : device_.Clients()) {
    ++(client == "x" ? of_x : of_y);
    if (of_y < kTiles) {
      EXPECT_LE(std::abs(of_x - of_y), 2);
    }
  }
  EXPECT_EQ(of_x, 2 * kTiles);
  EXPECT_EQ(of_y, kTiles);
}

TEST_F(CutLaunchTest, ADeadlineBetweenPartsRollsTheAppendBack) {
  Start();
  const SequenceId id = CreateSequence();
  Client client("x", On(Long(), id));
  client.operation.deadline = clock_.Now() + std::chrono::milliseconds(1);
  SubmitToGate(&client);
  PassOne();
  EXPECT_GT(engine_->sequences().stats().pages, 0u);
  clock_.Advance(std::chrono::milliseconds(1));
  device_.PassOne();
  const absl::Status status = client.ended.get();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), HasSubstr("between two parts"));
  EXPECT_THAT(device_.BatchSizes(), SizeIs(2)) << "it runs on";
  ExpectRolledBack(id);
}

TEST_F(CutLaunchTest, ACancellationBetweenPartsRollsTheAppendBack) {
  Start();
  const SequenceId id = CreateSequence();
  Client client("x", On(Long(), id));
  SubmitToGate(&client);
  client.operation.Cancel();
  device_.PassOne();
  EXPECT_EQ(client.ended.get().code(), absl::StatusCode::kCancelled);
  ExpectRolledBack(id);
}

TEST_F(CutLaunchTest, AFailedPartRollsTheAppendBack) {
  Start();
  const SequenceId id = CreateSequence();
  Client client("x", On(Long(), id));
  SubmitToGate(&client);
  PassOne();
  device_.SetResult(absl::InternalError("launch failed"));
  device_.PassOne();
  EXPECT_EQ(client.ended.get(), absl::InternalError("launch failed"));
  device_.SetResult(absl::OkStatus());
  EXPECT_THAT(device_.BatchSizes(), SizeIs(2));
  ExpectRolledBack(id);
}

TEST_F(CutLaunchTest, RequestsOnTheSameLayerWaitForTheLastPart) {
  Start();
  const SequenceId id = CreateSequence();
  Client append("x", On(Long(), id)), after_it("y", On(testing::MakeRequest(60, 0), id));
  after_it.operation.request.spans[0].expected_length = 1000;
  SubmitToGate(&append);
  ASSERT_EQ(Submit(&after_it), absl::OkStatus());
  EXPECT_EQ(engine_->sequences().Fork(id, {}, {}, kOwner)->layer_lengths[0], 0u);
  device_.SetOpen(true);
  EXPECT_EQ(append.ended.get(), absl::OkStatus());
  EXPECT_EQ(after_it.ended.get(), absl::OkStatus());
  EXPECT_EQ(device_.Clients().back(), "y");
  EXPECT_EQ(Length(id), 1000u);
}

// ---- Batches.

TEST_F(CutLaunchTest, ABatchHasTheWorkOfOneLaunch) {
  Start(4);
  Client first("x", Small());
  SubmitToGate(&first);
  std::vector<std::unique_ptr<Client>> waiting;
  for (int i = 0; i < 5; ++i) {  // each 1.6 tiles' work
    waiting.push_back(std::make_unique<Client>("x", testing::MakeRequest(100, 1000)));
    ASSERT_EQ(Submit(waiting.back().get()), absl::OkStatus());
  }
  device_.SetOpen(true);
  for (auto& client : waiting) EXPECT_EQ(client->ended.get(), absl::OkStatus());
  EXPECT_THAT(device_.BatchSizes(), ElementsAre(1, 2, 2, 1));
}

// When they are queued, the sequence is empty, so they seem to have no work.
TEST_F(CutLaunchTest, RequestsThatHaveGrownInTheQueueGetLaunchesOfTheirOwn) {
  Start();
  const SequenceId id = CreateSequence();
  AttendRequest load = On(testing::MakeRequest(0, 1000, 1), id);
  load.append_only = true;
  Client append("x", load);
  SubmitToGate(&append);
  std::vector<std::unique_ptr<Client>> waiting;
  for (int i = 0; i < 3; ++i) {
    waiting.push_back(std::make_unique<Client>("x", On(testing::MakeRequest(60, 0), id)));
    ASSERT_EQ(Submit(waiting.back().get()), absl::OkStatus());
  }
  device_.SetOpen(true);
  for (auto& client : waiting) EXPECT_EQ(client->ended.get(), absl::OkStatus());
  EXPECT_THAT(device_.BatchSizes(), ElementsAre(1, 1, 1, 1));
  EXPECT_EQ(metrics_.queue_depth.Value(), 0);
  const auto sizes = metrics_.batch_requests.Collect().histogram;
  EXPECT_EQ(sizes.sample_count, 4u);
  EXPECT_EQ(sizes.sample_sum, 4) << "those that go back are of no launch";
}

TEST_F(CutLaunchTest, TheDefaultLimitOfARequestIsASecondOfTheDevice) {
  Start();
  EXPECT_EQ(engine_->options().max_request_flop, 1e12);
  Client client("x", testing::MakeRequest(1 << 15, 1 << 16, 1, 1, 128));
  const absl::Status status = Submit(&client);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("at most 1e+12 are allowed"));
}

// ---- The end.

TEST_F(CutLaunchTest, EndAllEndsWhatDoesNotRunAtOnce) {
  Start();
  const SequenceId id = CreateSequence();
  Client begun("x", On(Long(), id)), running("y", Small()), queued("z", Small()),
      late("z", Small());
  SubmitToGate(&begun);
  ASSERT_EQ(Submit(&running), absl::OkStatus());
  PassOne();  // now `running` is at the gate, and the other waits for its next part
  ASSERT_EQ(Submit(&queued), absl::OkStatus());
  ASSERT_FALSE(begun.ended_now());
  const absl::Status end = absl::UnavailableError("the drain has no more time");
  engine_->EndAll(end);
  ASSERT_TRUE(begun.ended_now() && queued.ended_now());
  EXPECT_EQ(begun.ended.get(), end);
  EXPECT_EQ(queued.ended.get(), end);
  EXPECT_EQ(Length(id), 0u);
  EXPECT_EQ(Submit(&late).code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(running.ended_now());
  device_.SetOpen(true);
  EXPECT_EQ(running.ended.get(), absl::OkStatus());
  EXPECT_EQ(engine_->sequences().stats().pages, 0u);
  EXPECT_EQ(metrics_.queue_depth.Value(), 0);
}

TEST_F(CutLaunchTest, EndAllEndsWhatRunsAfterItsPart) {
  Start();
  const SequenceId id = CreateSequence();
  Client client("x", On(Long(), id));
  SubmitToGate(&client);
  const absl::Status end = absl::UnavailableError("the drain has no more time");
  engine_->EndAll(end);
  EXPECT_FALSE(client.ended_now());
  device_.PassOne();
  EXPECT_EQ(client.ended.get(), end);
  EXPECT_EQ(Length(id), 0u);
  EXPECT_EQ(engine_->sequences().stats().pages, 0u);
  EXPECT_EQ(engine_->load(), 0);
  EXPECT_EQ(metrics_.queue_depth.Value(), 0);
}

TEST_F(CutLaunchTest, CloseRunsOutTheParts) {
  Start();
  Client client("x", Long());
  SubmitToGate(&client);
  engine_->Close();
  device_.SetOpen(true);
  EXPECT_EQ(client.ended.get(), absl::OkStatus());
  EXPECT_THAT(device_.BatchSizes(), SizeIs(kTiles));
}

}  // namespace
}  // namespace flashcore::server
