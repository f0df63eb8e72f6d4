// The local socket against clients that break its rules for frames, and that die.
#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <thread>

#include "proto/wire/frames.h"
#include "tests/base/test_seed.h"
#include "tests/transport/local/setup.h"

namespace flashcore::server {
namespace {

using testing::ClientRing;
using ::testing::HasSubstr;
using testing::kPage;
using testing::LocalClient;
using testing::LocalServerTest;
using testing::Memfd;
using testing::StepRequest;

class LocalClientFaultsTest : public LocalServerTest {
 protected:
  // Starts and kills clients, each once `wait` returns, and expects that nothing of them is left.
  // Only `witness` is connected.
  void KillClients(int clients, Lane* witness, const std::function<void()>& wait);
  // Calls, reads no reply, and runs `now_and_then` meanwhile, until the server ends the connection.
  static void CallUntilTheEnd(
      LocalClient* client, const std::function<void()>& now_and_then = [] {}) {
    const timeval limit = {60, 0};  // a server that neither reads nor ends it is a failure
    setsockopt(client->fd(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    v1::LocalRequest request = CallOf("GetServerInfo", v1::GetServerInfoRequest());
    for (int calls = 1; calls < 1'000'000; ++calls) {
      request.set_id(client->NextId());
      if (!client->Send(request)) return;
      if (calls % 500 == 0) now_and_then();
    }
    FAIL() << "the connection does not end";
  }
  // A call, without an id, whose message and answer have that many rows.
  static v1::LocalRequest LargeAttend(uint32_t rows) {
    v1::AttendRequest request = StepRequest({""});
    request.mutable_spans(0)->set_query_rows(rows);
    request.mutable_query()->assign(rows * testing::kRowBytes, '\0');
    return CallOf("Attend", request);
  }
};

class LocalClientFaultsStressTest : public LocalClientFaultsTest {};

int OpenFiles() {
  int files = 0;
  DIR* const folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++files;
  closedir(folder);
  return files;
}

// ---- Frames.

TEST_F(LocalClientFaultsTest, BadFramesEndTheConnection) {
  StartLocal();
  const auto frame = [](const std::string& bytes) {
    std::string header(4, '\0');
    const auto length = static_cast<uint32_t>(bytes.size());
    std::memcpy(header.data(), &length, 4);
    return header + bytes;
  };
  v1::LocalRequest no_id, no_action, second_hello;
  no_id.mutable_cancel();
  no_action.set_id(7);
  second_hello.set_id(7);
  second_hello.mutable_hello();
  const std::string bad[] = {frame("\xff\xff\xff"),
                             std::string("\xff\xff\xff\xff", 4),
                             std::string("\x01\x00\x10\x00", 4),  // 1 MiB + 1
                             frame(""),
                             frame(no_id.SerializeAsString()),
                             frame(no_action.SerializeAsString()),
                             frame(second_hello.SerializeAsString())};
  for (const std::string& bytes : bad) {
    const auto client = Greeted();
    ASSERT_TRUE(client->SendBytes(bytes));
    LastWords(client.get());
  }
  LocalClient large(path_);                                          // a Hello is small
  ASSERT_TRUE(large.SendBytes(std::string("\x01\x04\x00\x00", 4)));  // 1 KiB + 1
  EXPECT_THAT(LastWords(&large), HasSubstr("at most 1024"));
  LocalClient rude(path_);  // no Hello
  v1::GetServerInfoResponse info;
  EXPECT_NE(rude.Call("GetServerInfo", v1::GetServerInfoRequest(), &info), absl::OkStatus());
  EXPECT_FALSE(rude.Receive().has_value());
  ExpectAlive();
}

TEST_F(LocalClientFaultsTest, FramesMayComeInPieces) {
  StartLocal();
  const auto client = Greeted();
  v1::LocalRequest request = CallOf("GetServerInfo", v1::GetServerInfoRequest());
  request.set_id(9);
  const std::string bytes = request.SerializeAsString();
  ASSERT_TRUE(client->SendBytes(std::string{static_cast<char>(bytes.size())}));
  ASSERT_TRUE(client->SendBytes(std::string(3, '\0')));
  for (const char byte : bytes) ASSERT_TRUE(client->SendBytes({byte}));
  EXPECT_TRUE(client->Receive().has_value());
}

TEST_F(LocalClientFaultsTest, StrayFilesEndTheConnection) {
  StartLocal();
  const int before = OpenFiles();
  for (int i = 0; i < 20; ++i) {
    const auto client = Greeted();
    v1::LocalRequest request = CallOf("GetServerInfo", v1::GetServerInfoRequest());
    request.set_id(9);
    ASSERT_TRUE(client->Send(request, STDERR_FILENO));
    while (client->Receive().has_value()) {
    }
  }
  ASSERT_TRUE(AllConnectionsEnd());
  EXPECT_TRUE(testing::WaitUntil([&] { return OpenFiles() <= before; }));
}

TEST_F(LocalClientFaultsTest, AnIdInUseEndsTheConnection) {
  StartLocal();
  Lane lane(path_);
  gate_.SetOpen(false);
  v1::LocalRequest call = CallOf("Attend", StepRequest({lane.Create()}));
  call.set_id(77);
  ASSERT_TRUE(lane.client.Send(call));
  ASSERT_TRUE(WaitForArrived(1));
  ASSERT_TRUE(lane.client.Send(call));
  EXPECT_THAT(LastWords(&lane.client), HasSubstr("77"));
  gate_.SetOpen(true);
  EXPECT_TRUE(AllConnectionsEnd());
}

TEST_F(LocalClientFaultsTest, AClientThatDoesNotReadRepliesIsCutOff) {
  Server::Options options = LocalServerOptions();
  options.unsent_replies.timeout = std::chrono::milliseconds(200);
  options.unsent_replies.bytes = {64 << 20, 16 << 20};
  StartLocal(options);
  CallUntilTheEnd(Greeted().get());
  EXPECT_TRUE(AllConnectionsEnd());
  ExpectAlive();
}

// Each reply has its time, however much of it is read.
TEST_F(LocalClientFaultsTest, AClientThatHardlyReadsIsCutOff) {
  clock_ = &fake_clock_;
  const Server::Options options = LocalServerOptions();
  StartLocal(options);
  const auto client = Greeted();
  v1::LocalRequest call = LargeAttend(15'000);
  v1::GetServerInfoResponse info;
  call.set_id(client->NextId());
  ASSERT_TRUE(client->Send(call));
  pollfd readable = {client->fd(), POLLIN, 0};
  ASSERT_EQ(poll(&readable, 1, -1), 1);
  // The same thread answers: now it waits for the client to read more.
  ASSERT_EQ(Greeted()->Call("GetServerInfo", v1::GetServerInfoRequest(), &info), absl::OkStatus());
  fake_clock_.Advance(options.unsent_replies.timeout / 2);
  // The kernel holds less than 256 of the reply's 940 KiB.
  std::string bytes(size_t{512} << 10, '\0');
  ASSERT_EQ(recv(client->fd(), bytes.data(), bytes.size(), MSG_WAITALL),
            static_cast<ssize_t>(bytes.size()));
  fake_clock_.Advance(options.unsent_replies.timeout / 2);
  EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->local_connections.Value() == 0; }));
  EXPECT_EQ(Refused("unread"), 1);
}

TEST_F(LocalClientFaultsTest, AClientThatLeavesTooMuchUnreadIsCutOff) {
  Server::Options options = LocalServerOptions();
  options.unsent_replies.bytes = {256 << 10, 64 << 10};
  StartLocal(options);
  CallUntilTheEnd(Greeted().get(), [this] {
    EXPECT_TRUE(GatedServerTest::Send(StepRequest({""}), "other")->status.get().ok());
  });
  EXPECT_TRUE(AllConnectionsEnd());
  EXPECT_EQ(Refused("unread"), 1);
  ExpectAlive();
}

TEST_F(LocalClientFaultsTest, HalfFramesStayWithinTheShare) {
  const Server::Options options = LocalServerOptions();
  StartLocal(options);
  constexpr int kConnections = 200;
  const size_t share = options.transport_memory_bytes / 4;
  const std::string half = std::string("\x00\x00\x10\x00", 4) + std::string(100 << 10, '\0');
  // A connection has room for its whole frame as soon as the length is there.
  const int most =
      static_cast<int>(share / (wire::kFrameHeaderBytes + size_t{wire::kMaxFrameBytes}));
  std::vector<std::unique_ptr<LocalClient>> clients;
  for (int i = 0; i < kConnections; ++i) clients.push_back(Greeted());
  for (const auto& client : clients) client->SendBytes(half);
  EXPECT_TRUE(testing::WaitUntil([&] { return Refused("memory") >= kConnections - most; }));
  EXPECT_GE(metrics_->local_connections.Value(), most);
  int told = 0;
  for (const auto& client : clients) {
    pollfd readable = {client->fd(), POLLIN, 0};
    if (poll(&readable, 1, 0) != 1) continue;
    const auto reply = client->Receive();
    if (!reply.has_value()) continue;
    EXPECT_EQ(reply->id(), 0);
    EXPECT_THAT(reply->status().message(), HasSubstr("--transport_memory_bytes"));
    ++told;
  }
  EXPECT_GT(told, 0);
  clients.clear();
  ASSERT_TRUE(AllConnectionsEnd());
  ExpectAlive();
}

TEST_F(LocalClientFaultsTest, ABufferOfALargeFrameShrinks) {
  StartLocal();
  v1::LocalRequest large;
  large.mutable_call()->set_method(std::string(900 << 10, 'x'));
  std::vector<std::unique_ptr<LocalClient>> clients;
  for (int i = 0; i < 40; ++i) {  // more than fit at a time
    clients.push_back(Greeted());
    EXPECT_EQ(clients.back()->Do(large).code(), absl::StatusCode::kUnimplemented);
  }
  EXPECT_EQ(Refused("memory"), 0);
}

TEST_F(LocalClientFaultsTest, SurvivesWithoutFiles) {
  StartLocal();
  Lane lane(path_);
  const Memfd memory(kPage);
  const v1::AttendRequest request = lane.Step(lane.Create());
  LocalClient late(path_);
  ASSERT_EQ(late.Hello(), absl::OkStatus());
  std::string id;
  ASSERT_EQ(late.Register(memory.fd(), kPage, &id), absl::OkStatus());
  // UBSan opens a pipe when it sees an object of a class for the first time: it sees them here.
  std::string other;
  ClientRing ring;
  ASSERT_NE(late.Register(memory.fd(), 2 * kPage, &other), absl::OkStatus());
  ASSERT_NE(ring.Open(&late, memory, "no region", 0, 1, 256), absl::OkStatus());
  ASSERT_EQ(lane.Attend(request), absl::OkStatus());
  rlimit old;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
  rlimit none = old;
  none.rlim_cur = 3;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const absl::Status registered = late.Register(memory.fd(), kPage, &other);
  const absl::Status opened = ring.Open(&late, memory, id, 0, 1, 256);
  const absl::Status attended = lane.Attend(request);
  setrlimit(RLIMIT_NOFILE, &old);
  EXPECT_EQ(registered.code(), absl::StatusCode::kResourceExhausted) << registered;
  EXPECT_EQ(opened.code(), absl::StatusCode::kResourceExhausted) << opened;
  EXPECT_EQ(attended, absl::OkStatus());
  EXPECT_EQ(late.Register(memory.fd(), kPage, &other), absl::OkStatus());
  ExpectAlive();
}

// A client that sends requests as fast as it can, until it is killed.
[[noreturn]] void Hammer(const std::string& path) {
  while (true) {
    LocalClient client(path);
    const Memfd memory(16 * kPage);
    std::string region;
    ClientRing ring;
    absl::Status status = client.Hello();
    status.Update(client.Register(memory.fd(), memory.bytes(), &region));
    status.Update(ring.Open(&client, memory, region, 0, 8, 1024));
    v1::CreateSequenceResponse created;
    status.Update(client.Call("CreateSequence", testing::CreateRequest(), &created));
    if (!status.ok()) continue;
    const std::string step = StepRequest({created.sequence_id()}).SerializeAsString();
    for (int i = 0; i < 500; ++i) {
      for (int slot = 0; slot < 8; ++slot) ring.Submit(slot, step);
      v1::AttendResponse response;
      uint64_t tag = 0;
      for (int slot = 0; slot < 8; ++slot) ring.Receive(&tag, &response);
    }
  }
}

void LocalClientFaultsTest::KillClients(int clients, Lane* witness,
                                        const std::function<void()>& wait) {
  const v1::AttendRequest request = witness->Step(witness->Create());
  const int before = OpenFiles();
  for (int i = 0; i < clients; ++i) {
    const pid_t child = fork();
    if (child == 0) Hammer(path_);
    ASSERT_GT(child, 0);
    wait();
    ASSERT_EQ(kill(child, SIGKILL), 0);
    ASSERT_EQ(waitpid(child, nullptr, 0), child);
    ASSERT_EQ(witness->Attend(request), absl::OkStatus());
  }
  EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->local_connections.Value() == 1; }));
  EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->local_rings.Value() == 1; }));
  EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->shared_memory_regions.Value() == 1; }));
  EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->inflight_requests.Value() == 0; }));
  EXPECT_TRUE(testing::WaitUntil([&] { return OpenFiles() <= before; }));
  EXPECT_TRUE(AllStagingReturns());
}

TEST_F(LocalClientFaultsTest, ClientsMayBeKilledWhileTheyHaveRequests) {
  StartLocal();
  Lane witness(path_);
  for (int i = 0; i < 4; ++i) {
    KillClients(1, &witness, [&] {
      EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->local_rings.Value() == 2; }));
      EXPECT_TRUE(WaitForArrived(gate_.arrived() + 1));
    });
  }
}

TEST_F(LocalClientFaultsStressTest, ClientsMayBeKilledAtAnyInstruction) {
  StartLocal();
  Lane witness(path_);
  std::mt19937 random(TestSeed());
  KillClients(60, &witness,
              [&] { std::this_thread::sleep_for(std::chrono::microseconds(random() % 40'000)); });
}

TEST_F(LocalClientFaultsTest, RequestsOfADeadClientAreNotLaunched) {
  StartLocal();
  Lane witness(path_);
  gate_.SetOpen(false);
  witness.ring.Submit(1, witness.Step(witness.Create()));
  ASSERT_TRUE(WaitForArrived(1));
  {
    Lane lane(path_);
    const std::string id = lane.Create();
    for (int i = 0; i < 8; ++i) lane.ring.Submit(i, lane.Step(id));
    ASSERT_TRUE(WaitForQueued(8));
  }
  ASSERT_TRUE(testing::WaitUntil([&] { return metrics_->local_connections.Value() == 1; }));
  EXPECT_EQ(metrics_->local_rings.Value(), 2);  // its requests keep it
  gate_.SetOpen(true);
  ASSERT_TRUE(testing::WaitUntil([&] { return metrics_->local_rings.Value() == 1; }));
  EXPECT_EQ(gate_.arrived(), 1);
}

}  // namespace
}  // namespace flashcore::server
