// Turns behind the local socket, piece by piece: rings and their requests, calls and their memory.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "proto/wire/frames.h"
#include "server/sharing/call_room.h"
#include "server/transport/grpc/adapters.h"
#include "server/transport/local/calls.h"
#include "server/transport/local/connection.h"
#include "server/transport/local/ring_poller.h"
#include "server/transport/local/ring_session.h"
#include "server/transport/local/ring_turns.h"
#include "tests/memory/memfd.h"
#include "tests/transport/local/setup.h"

namespace flashcore::server::local {
namespace {

using server::testing::kLoopback;
using server::testing::Memfd;
using server::testing::WaitUntil;

constexpr uint32_t kSlots = 64, kSlotBytes = 512;
constexpr int kOk = 0;
constexpr int kCancelled = static_cast<int>(absl::StatusCode::kCancelled);

// A ring without a connection: both of its ends.
struct TestRing {
  TestRing(const CallServices& services, const std::string& client)
      : memory((wire::RingBytes(kSlots, kSlotBytes) + 4095) / 4096 * 4096),
        header(reinterpret_cast<wire::RingHeader*>(memory.data())) {
    const std::shared_ptr<const SharedRegion> region = memory.Map();
    RpcContext* const context = services.methods->context();
    session = std::make_shared<RingSession>(
        Exchange::Origin{services.methods->fleet(), context,
                         services.methods->Rpc("Attend", "local")},
        services.uses, Identity{client, {}}, std::make_shared<Regions>(),
        Ring::Open(region, {0, kSlots, kSlotBytes}).value(),
        RingSession::Callbacks{[](const absl::Status& why) { ADD_FAILURE() << why; }, [] {}});
  }

  // Without the doorbell.
  void Submit(uint64_t tag, const std::string& message) {
    const uint64_t number = header->submitted.load();
    const wire::SubmissionSlot slot = {tag, 0, static_cast<uint32_t>(message.size()), 0};
    std::byte* const to = memory.data() + sizeof(wire::RingHeader) + number % kSlots * kSlotBytes;
    std::memcpy(to, &slot, sizeof(slot));
    std::memcpy(to + sizeof(slot), message.data(), message.size());
    header->submitted.store(number + 1);
  }
  void SubmitBad(int count) {
    for (int i = 0; i < count; ++i) Submit(1, "\xff");
  }
  // The status codes of the first `count` answers, by request_id.
  std::map<std::string, int> Codes(uint64_t count) const {
    EXPECT_TRUE(WaitUntil([&] { return header->completed.load() >= count; }));
    std::map<std::string, int> codes;
    for (uint64_t i = 0; i < count; ++i) {
      const std::byte* const slot =
          memory.data() + sizeof(wire::RingHeader) + (kSlots + i) * size_t{kSlotBytes};
      wire::CompletionSlot of;
      std::memcpy(&of, slot, sizeof(of));
      v1::AttendResponse response;
      EXPECT_TRUE(response.ParseFromArray(slot + sizeof(of), static_cast<int>(of.bytes)));
      codes[response.request_id()] = response.status().code();
    }
    return codes;
  }

  Memfd memory;
  wire::RingHeader* const header;
  std::shared_ptr<RingSession> session;
};

class LocalTurnsTest : public server::testing::LocalServerTest {
 protected:
  explicit LocalTurnsTest(bool fake_clock = false) {
    if (fake_clock) clock_ = &fake_clock_;
    StartLocal();
    rpc_context_.reset(new RpcContext{metrics_.get(), clock_, Authenticator({}, metrics_.get()),
                                      &client_connections_, MakeGrpcAlarm});
    methods_ = std::make_unique<AttentionMethods>(AttentionMethods::Options(), fleet_.get(),
                                                  rpc_context_.get());
    method_table_ = std::make_unique<MethodTable>(methods_.get());
    services_ = {methods_.get(), &room_, &long_calls_, &uses_};
  }
  ~LocalTurnsTest() override {
    gate_.SetOpen(true);
    uses_.WaitForNone();
  }

  std::string Step(const std::string& request_id) {
    v1::AttendRequest request = server::testing::StepRequest({Create()});
    request.set_request_id(request_id);
    return request.SerializeAsString();
  }
  // A call that has not started. `answered` gets its reply, on any thread.
  std::shared_ptr<PendingCall> NewCall(
      const char* method, const google::protobuf::Message& request,
      std::function<void(const absl::StatusOr<std::string>& reply)> answered,
      TimePoint deadline = kNoDeadline) {
    return method_table_->Find(method)->make(
        CallSetup{&services_, kLoopback, regions_, deadline}, request.SerializeAsString(),
        [answered = std::move(answered)](const std::shared_ptr<PendingCall>&,
                                         const absl::StatusOr<std::string>& reply) {
          answered(reply);
        });
  }
  // A launch that waits at the gate, so that later requests stay in the queue.
  void CloseGate() {
    gate_.SetOpen(false);
    blocker_ = Send(server::testing::StepRequest({Create()}));
    ASSERT_TRUE(WaitForArrived(1));
  }

  ClientConnections client_connections_{1};
  std::unique_ptr<RpcContext> rpc_context_;
  std::unique_ptr<AttentionMethods> methods_;
  std::unique_ptr<MethodTable> method_table_;
  const std::shared_ptr<Regions> regions_ = std::make_shared<Regions>();
  CallRoom room_{{}};
  UseCount uses_;
  FairJobs long_calls_;
  CallServices services_;
  std::unique_ptr<Call> blocker_;
};

// ---- Rings.

TEST_F(LocalTurnsTest, ClientsTakeTurnsHoweverManyRingsTheyHave) {
  RingTurns turns;
  std::vector<std::unique_ptr<TestRing>> many;
  for (int i = 0; i < 16; ++i) {
    many.push_back(std::make_unique<TestRing>(services_, "uid:1"));
    many.back()->SubmitBad(kSlots);
    turns.Add(many.back()->session);
  }
  TestRing one(services_, "uid:2");
  one.SubmitBad(16);
  turns.Add(one.session);
  const auto taken = [&] {
    uint64_t sum = 0;
    for (const auto& ring : many) sum += ring->header->taken.load();
    return sum;
  };
  for (const uint64_t turn : {1, 2}) {
    EXPECT_TRUE(turns.Poll());
    EXPECT_EQ(taken(), 8 * turn);
    EXPECT_EQ(one.header->taken.load(), 8 * turn);
  }
  for (int turn = 3; turn <= 16; ++turn) EXPECT_TRUE(turns.Poll());
  for (const auto& ring : many) EXPECT_EQ(ring->header->taken.load(), 8u) << "its rings take turns";
  turns.Remove(many[0]->session);
  for (int turn = 0; turn < 15 * 7; ++turn) EXPECT_TRUE(turns.Poll());
  EXPECT_FALSE(turns.Poll());
  EXPECT_EQ(many[0]->header->taken.load(), 8u);
  for (const auto& ring : many) turns.Remove(ring->session);
  turns.Remove(one.session);
  EXPECT_TRUE(turns.empty());
}

TEST_F(LocalTurnsTest, ARingSleepsUntilItsNextRequestIsTaken) {
  RingTurns turns;
  TestRing ring(services_, "uid:1");
  turns.Add(ring.session);
  EXPECT_FALSE(turns.Poll());
  EXPECT_EQ(ring.header->server_sleeps.load(), 0u);
  ring.SubmitBad(1);  // after the poll, without the doorbell
  EXPECT_TRUE(turns.Sleep());
  EXPECT_TRUE(turns.Poll());
  EXPECT_EQ(ring.header->server_sleeps.load(), 0u);
  EXPECT_FALSE(turns.Poll());
  EXPECT_FALSE(turns.Sleep());
  EXPECT_EQ(ring.header->server_sleeps.load(), 1u);
  EXPECT_FALSE(turns.Poll());
  EXPECT_EQ(ring.header->server_sleeps.load(), 1u);
  ring.SubmitBad(1);
  EXPECT_TRUE(turns.Poll());
  EXPECT_EQ(ring.header->server_sleeps.load(), 0u);
}

// The clock of a poller alone. Once armed, its next Now is after `on_now`, and later than any
// spinning lasts.
class HookedClock final : public Clock {
 public:
  TimePoint Now() const override {
    ++asked;
    if (armed.exchange(false)) {
      on_now();
      now = now.load() + std::chrono::hours(2);
    }
    return now;
  }
  std::unique_ptr<Timer> NewTimer() const override { return nullptr; }

  std::function<void()> on_now;
  mutable std::atomic<bool> armed{false};
  mutable std::atomic<int> asked{0};
  mutable std::atomic<TimePoint> now{TimePoint(std::chrono::hours(1))};
};

TEST_F(LocalTurnsTest, ThePollerDoesNotSleepOverARequestThatCameAfterItsLastLook) {
  TestRing ring(services_, "uid:1");
  HookedClock clock;
  clock.on_now = [&] {
    EXPECT_EQ(ring.header->server_sleeps.load(), 0u) << "a client would ring the doorbell";
    ring.SubmitBad(1);
  };
  InputWaits waits(&clock);
  RingPoller poller(std::chrono::hours(1), &waits, &clock);
  poller.Add(ring.session);
  // The first time it does not sleep in any case: adding the ring has woken it.
  for (const uint64_t round : {1, 2, 3}) {
    const int asked = clock.asked;
    ASSERT_TRUE(WaitUntil([&] { return clock.asked > asked + 100; })) << "it spins";
    clock.armed = true;
    ASSERT_TRUE(WaitUntil([&] { return ring.header->completed.load() == round; }));
  }
}

TEST_F(LocalTurnsTest, ACancelReachesRequestsInTheirSlots) {
  TestRing ring(services_, kLoopback.name);
  ring.Submit(1, Step("a"));
  ring.Submit(2, Step("b"));
  ring.Submit(1, Step("c"));
  ring.session->Cancel(1);
  ring.session->Cancel(1);
  ring.session->Cancel(99);   // there is none
  ring.Submit(1, Step("d"));  // after the cancel
  ring.Submit(3, Step("e"));
  ring.session->Cancel(3);
  EXPECT_TRUE(ring.session->Poll());
  EXPECT_EQ(ring.Codes(5),
            (std::map<std::string, int>{
                {"a", kCancelled}, {"b", kOk}, {"c", kCancelled}, {"d", kOk}, {"e", kCancelled}}));
}

TEST_F(LocalTurnsTest, ACancelReachesRequestsInTheEngineAndNoLaterOnes) {
  CloseGate();
  TestRing ring(services_, kLoopback.name);
  for (const char* id : {"a", "b", "c"}) ring.Submit(1, Step(id));
  ring.Submit(2, Step("other"));
  EXPECT_TRUE(ring.session->Poll());
  ASSERT_TRUE(WaitForQueued(4));
  ring.session->Cancel(1);
  ring.Submit(1, Step("later"));
  EXPECT_TRUE(ring.session->Poll());
  ring.session->Cancel(7);
  gate_.SetOpen(true);
  EXPECT_EQ(ring.Codes(5), (std::map<std::string, int>{{"a", kCancelled},
                                                       {"b", kCancelled},
                                                       {"c", kCancelled},
                                                       {"other", kOk},
                                                       {"later", kOk}}));
}

TEST_F(LocalTurnsTest, RequestsOfOneTagEndInAnyOrder) {
  TestRing ring(services_, kLoopback.name);
  // The middle one of three, the last and the first end before the cancel: they are refused.
  CloseGate();
  ring.Submit(1, Step("a"));
  ring.Submit(1, "\xff");
  ring.Submit(1, Step("b"));
  ring.Submit(1, "\xff");
  EXPECT_TRUE(ring.session->Poll());
  ring.session->Cancel(1);
  ring.session->Cancel(1);
  gate_.SetOpen(true);
  const auto codes = ring.Codes(4);
  EXPECT_EQ(codes.at("a"), kCancelled);
  EXPECT_EQ(codes.at("b"), kCancelled);
  // All have been answered: the tag is free again.
  ring.Submit(1, Step("c"));
  EXPECT_TRUE(ring.session->Poll());
  EXPECT_EQ(ring.Codes(5).at("c"), kOk);
}

TEST_F(LocalTurnsTest, TheEndOfARingCancelsWhatIsInTheEngine) {
  CloseGate();
  TestRing ring(services_, kLoopback.name);
  for (const char* id : {"a", "b"}) ring.Submit(1, Step(id));
  ring.Submit(2, Step("c"));
  EXPECT_TRUE(ring.session->Poll());
  ASSERT_TRUE(WaitForQueued(3));
  ring.session->End();
  ring.session->Cancel(1);
  gate_.SetOpen(true);
  for (const auto& [id, code] : ring.Codes(3)) EXPECT_EQ(code, kCancelled) << id;
}

// ---- Calls.

TEST_F(LocalTurnsTest, ACallThatWaitedTooLongOrWasCancelledIsNotRun) {
  std::vector<absl::StatusCode> codes;
  const auto start = [&](TimePoint deadline, bool cancel) {
    const auto call = NewCall(
        "CreateSequence", server::testing::CreateRequest(),
        [&](const absl::StatusOr<std::string>& reply) { codes.push_back(reply.status().code()); },
        deadline);
    if (cancel) call->Cancel();
    call->Start();
  };
  start(kNoDeadline, /*cancel=*/false);
  start(clock_->Now(), /*cancel=*/false);
  start(kNoDeadline, /*cancel=*/true);
  EXPECT_EQ(codes, (std::vector<absl::StatusCode>{absl::StatusCode::kOk,
                                                  absl::StatusCode::kDeadlineExceeded,
                                                  absl::StatusCode::kCancelled}));
  EXPECT_EQ(engine_->sequences().stats().sequences, 1u);
}

// A connection without the server, and its client's end.
class LocalConnectionTest : public LocalTurnsTest {
 protected:
  LocalConnectionTest() : LocalTurnsTest(/*fake_clock=*/true) {
    rpc_context_->unsent.Start({}, clock_);
    int sockets[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, sockets), 0);
    client_ = FileDescriptor(sockets[0]);
    connection_services_.calls = services_;
    connection_services_.methods = method_table_.get();
    connection_services_.attend = {fleet_.get(), rpc_context_.get(),
                                   methods_->Rpc("Attend", "local")};
    connection_services_.passed_files = &passed_files_;
    connection_ = std::make_shared<Connection>(&connection_services_, Connection::Options(),
                                               FileDescriptor(sockets[1]), "client", clock_->Now());
    v1::LocalRequest hello;
    hello.mutable_hello()->set_min_version(wire::kLocalVersion);
    hello.mutable_hello()->set_max_version(wire::kLocalVersion);
    Send({hello});
    connection_->OnEvents(EPOLLIN);
    EXPECT_EQ(Replies().size(), 1u);
  }

  // At once.
  void Send(std::vector<v1::LocalRequest> requests) {
    std::string bytes;
    for (v1::LocalRequest& request : requests) {
      request.set_id(++last_id_);
      bytes += wire::Frame(request.SerializeAsString());
    }
    EXPECT_EQ(send(client_.get(), bytes.data(), bytes.size(), 0),
              static_cast<ssize_t>(bytes.size()));
  }
  static v1::LocalRequest Create(uint64_t timeout_ns = 0) {
    v1::LocalRequest request;
    request.mutable_call()->set_method("CreateSequence");
    request.mutable_call()->set_message(server::testing::CreateRequest().SerializeAsString());
    request.mutable_call()->set_timeout_ns(timeout_ns);
    return request;
  }
  // The codes of the replies since the last look.
  std::vector<int> Replies() {
    char buffer[1 << 16];
    const ssize_t size = recv(client_.get(), buffer, sizeof(buffer), 0);
    std::vector<int> codes;
    for (ssize_t at = 0; at < size;) {
      v1::LocalReply reply;
      const uint32_t length = wire::FrameLength(buffer + at);
      at += static_cast<ssize_t>(wire::kFrameHeaderBytes);
      EXPECT_TRUE(reply.ParseFromArray(buffer + at, static_cast<int>(length)));
      at += length;
      codes.push_back(reply.status().code());
    }
    return codes;
  }
  size_t sequences() const { return engine_->sequences().stats().sequences; }

  PassedFiles passed_files_;
  Connection::Services connection_services_;
  FileDescriptor client_;
  std::shared_ptr<Connection> connection_;
  uint64_t last_id_ = 0;
};

TEST_F(LocalConnectionTest, ACallIsAnsweredInItsTurnAndEndsIt) {
  Send({Create(), Create(), Create()});
  connection_->OnEvents(EPOLLIN);
  for (size_t turn = 1; turn <= 3; ++turn) {
    EXPECT_EQ(Replies(), std::vector<int>{kOk});
    EXPECT_EQ(sequences(), turn);
    EXPECT_TRUE(connection_->has_more());  // the last time, it does not know that there is none
    connection_->OnEvents(0);
  }
  EXPECT_EQ(Replies(), std::vector<int>{});
  EXPECT_FALSE(connection_->has_more());
}

TEST_F(LocalConnectionTest, ATimeoutCountsFromWhenTheCallWasRead) {
  Send({Create(), Create(/*timeout_ns=*/1000), Create(/*timeout_ns=*/1001)});
  connection_->OnEvents(EPOLLIN);
  fake_clock_.Advance(std::chrono::nanoseconds(1000));
  connection_->OnEvents(0);
  connection_->OnEvents(0);
  EXPECT_EQ(Replies(),
            (std::vector<int>{kOk, static_cast<int>(absl::StatusCode::kDeadlineExceeded), kOk}));
  EXPECT_EQ(sequences(), 2u);
}

TEST_F(LocalConnectionTest, TheRestOfTheCallsOfAClientThatIsGoneIsNotRun) {
  Send({Create(), Create(), Create()});
  client_ = FileDescriptor();
  connection_->OnEvents(EPOLLIN | EPOLLHUP);
  EXPECT_TRUE(connection_->ended());
  EXPECT_EQ(sequences(), 1u);
}

TEST_F(LocalTurnsTest, EachOperationOfAManageSequencesHasATurnOfItsOwn) {
  FairJobs& jobs = long_calls_;
  v1::ManageSequencesRequest request;
  for (int i = 0; i < 3; ++i) {
    *request.add_operations()->mutable_create() = server::testing::CreateRequest();
  }
  v1::ManageSequencesResponse response;
  const auto call =
      NewCall("ManageSequences", request, [&](const absl::StatusOr<std::string>& reply) {
        ASSERT_EQ(reply.status(), absl::OkStatus());
        EXPECT_TRUE(response.ParseFromString(*reply));
      });
  std::vector<size_t> seen;  // by another client in its turns
  const auto look = [&] { seen.push_back(engine_->sequences().stats().sequences); };
  std::promise<void> go, end;
  jobs.Add("third", [&] { go.get_future().wait(); });
  jobs.Add(kLoopback.name, [&] { call->Start(); });
  for (int i = 0; i < 3; ++i) jobs.Add("other", look);
  jobs.Add("other", [&] { end.set_value(); });
  go.set_value();
  end.get_future().wait();
  EXPECT_EQ(seen, (std::vector<size_t>{1, 2, 3}));
  ASSERT_EQ(response.results_size(), 3);
  for (const v1::SequenceResult& result : response.results()) {
    EXPECT_TRUE(result.has_sequence());
  }
}

// So a client that loads faster than the device appends is not read any further.
TEST_F(LocalTurnsTest, AChunkKeepsItsRoomUntilItIsAppended) {
  constexpr size_t kShare = 3000;  // two calls and a bit
  CallRoom room({0, kShare});
  services_.room = &room;
  v1::LoadSequenceRequest chunk;
  chunk.set_sequence_id(Create());
  chunk.set_layout(v1::LAYOUT_NHD);
  chunk.set_rows(1);
  chunk.set_key(std::string(server::testing::kRowBytes, '\0'));
  chunk.set_value(chunk.key());
  std::vector<std::shared_ptr<PendingCall>> calls;  // as a connection, until they are answered
  std::mutex mutex;                                 // of `answers`: lanes add to them
  std::vector<absl::Status> answers;
  const auto answered = [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    return answers.size();
  };
  const auto start = [&] {
    calls.push_back(NewCall("LoadSequence", chunk, [&](const absl::StatusOr<std::string>& reply) {
      const std::lock_guard<std::mutex> lock(mutex);
      answers.push_back(reply.status());
    }));
    calls.back()->Start();
  };
  CloseGate();
  EXPECT_TRUE(room.HasRoom(kLoopback.name));
  for (int i = 0; i < 3; ++i) start();
  ASSERT_TRUE(WaitForQueued(3));
  EXPECT_FALSE(room.HasRoom(kLoopback.name));
  EXPECT_EQ(answered(), 0u) << "a chunk was answered that is not appended";
  bool went_on = false;
  room.WaitForRoom(kLoopback.name, [&] { went_on = true; });
  gate_.SetOpen(true);
  EXPECT_TRUE(WaitForEnd(*blocker_));
  ASSERT_TRUE(WaitUntil([&] { return answered() == 3; }));
  EXPECT_EQ(Length(chunk.sequence_id()), 3u);
  EXPECT_EQ(answers, std::vector<absl::Status>(3));
  EXPECT_FALSE(went_on);
  calls.clear();
  uses_.WaitForNone();  // a lane may have had the last reference
  EXPECT_TRUE(went_on);
}

TEST_F(LocalTurnsTest, AClientThatLeavesTooMuchUnreadIsRefused) {
  UnsentReplies::Options limits;
  limits.bytes = {0, 4000};
  rpc_context_->unsent.Start(limits, clock_);
  const auto call = [&](const Identity& client) {
    std::string response;
    return method_table_->Find("CreateSequence")
        ->run(absl::OkStatus(), client, server::testing::CreateRequest().SerializeAsString(),
              &response);
  };
  UnsentReply reply(&rpc_context_->unsent, [](CutOff, bool) { ADD_FAILURE(); });
  reply.Ready(kLoopback.name, 3001);  // more than three quarters of its share
  const absl::Status refused = call(kLoopback);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.message(), ::testing::HasSubstr("Read replies before sending more"));
  EXPECT_EQ(engine_->sequences().stats().sequences, 0u);
  EXPECT_EQ(call({"another", {}}), absl::OkStatus());
  reply.Sent();
  EXPECT_EQ(call(kLoopback), absl::OkStatus());
}

}  // namespace
}  // namespace flashcore::server::local
