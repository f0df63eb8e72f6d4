#include "server/access/client_connections.h"

#include <unistd.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/base/fake_clock.h"
#include "tests/base/has_info.h"
#include "tests/transport/gated_server.h"

namespace flashcore::server {
namespace {

TEST(ClientConnectionsTest, AConnectionCountsOncePerClientUntilItEnds) {
  ClientConnections connections(1);
  const auto first = connections.Open("fd:1", {});
  const auto second = connections.Open("fd:2", {});
  EXPECT_TRUE(connections.Use(*first, "alice").ok());
  EXPECT_TRUE(connections.Use(*first, "alice").ok());
  EXPECT_TRUE(connections.Use(*first, "bob").ok());
  const absl::Status refused = connections.Use(*second, "alice");
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(refused, testing::HasInfo("QUOTA_EXCEEDED", {{"limit", "max_connections_per_client"},
                                                           {"needed", "1"},
                                                           {"used", "1"},
                                                           {"allowed", "1"}}));
  EXPECT_TRUE(connections.Use(*second, "carol").ok());
  connections.Close(*first);
  EXPECT_TRUE(connections.Use(*second, "alice").ok());
}

TEST(ClientConnectionsTest, AnUnknownConnectionDoesNotCount) {
  ClientConnections connections(1);
  for (const char* peer : {"unix:", "ipv4:127.0.0.1:9", "inproc"}) {
    const auto unknown = connections.Find(peer);
    EXPECT_EQ(unknown->peer().address, peer);
    EXPECT_EQ(unknown->peer().user, std::nullopt);
    EXPECT_TRUE(connections.Use(*unknown, "alice").ok());
    connections.Close(*unknown);
  }
}

TEST(ClientConnectionsTest, KnowsWhoIsAtTheOtherEndUntilTheConnectionEnds) {
  ClientConnections connections(1);
  const auto first = connections.Open("fd:1", {"unix:", uid_t{7}});
  EXPECT_EQ(connections.Find("fd:1"), first);
  EXPECT_EQ(first->peer().user, uid_t{7});
  EXPECT_EQ(first->peer().address, "unix:");
  connections.Close(*first);
  EXPECT_EQ(connections.Find("fd:1"), nullptr);
}

// gRPC closes its descriptor, and the next connection gets it, before the end of the first is seen.
TEST(ClientConnectionsTest, ANameThatIsTakenAgainIsTheNewConnections) {
  ClientConnections connections(1);
  const auto first = connections.Open("fd:1", {"unix:", uid_t{7}});
  EXPECT_TRUE(connections.Use(*first, "alice").ok());
  const auto again = connections.Open("fd:1", {"unix:", uid_t{8}});
  const auto second = connections.Open("fd:2", {});
  EXPECT_TRUE(connections.Use(*second, "alice").ok());  // the first does not count any more
  EXPECT_TRUE(connections.Use(*first, "alice").ok());   // nor does it come back
  connections.Close(*first);
  EXPECT_EQ(connections.Find("fd:1"), again);
}

TEST(ClientConnectionsTest, CountsTheCallsOfAConnection) {
  testing::FakeClock clock;
  ClientConnections connections(1);
  const auto connection = connections.Open("fd:1", {});
  EXPECT_EQ(connection->last_end(), TimePoint::min());
  {
    const ConnectionCall first(connection, &clock);
    {
      const ConnectionCall second(connection, &clock);
      EXPECT_EQ(connection->started(), 2u);
      EXPECT_EQ(connection->finished(), 0u);
      clock.Advance(std::chrono::seconds(1));
    }
    EXPECT_EQ(connection->finished(), 1u);
    EXPECT_EQ(connection->last_end(), clock.Now());
    connections.Close(*connection);  // a call may end later
  }
  EXPECT_EQ(connection->started(), 2u);
  EXPECT_EQ(connection->finished(), 2u);
  const ConnectionCall local(nullptr, &clock);
  EXPECT_EQ(local.connection(), nullptr);
}

// Through gRPC, which names the peers.
class ClientConnectionsRpcTest : public testing::GatedServerTest,
                                 public ::testing::WithParamInterface<const char*> {
 protected:
  void Start(int max_per_host = 256) {
    Server::Options options = testing::ServerOptions();
    options.listen = {GetParam()};
    if (options.listen[0] == "unix") {
      options.listen[0] = absl::StrCat("unix:", ::testing::TempDir(), "/connections.", getpid());
    }
    options.connections.max_per_client = 2;
    options.connections.max_per_host = max_per_host;
    clock_ = &fake_clock_;
    StartFake({}, options);
  }

  // With `patience`, tries to connect for so long.
  static grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel,
                           std::chrono::seconds patience = std::chrono::seconds(0)) {
    grpc::ClientContext context;
    if (patience > std::chrono::seconds(0)) {
      context.set_wait_for_ready(true);
      context.set_deadline(std::chrono::system_clock::now() + patience);
    }
    v1::GetServerInfoResponse info;
    return v1::AttentionService::NewStub(channel)->GetServerInfo(&context, {}, &info);
  }
  double refused(const std::string& reason) const {
    return testing::CounterOf(*metrics_, "flashcore_connections_refused_total", reason);
  }
};

TEST_P(ClientConnectionsRpcTest, RefusesCallsOnOneConnectionTooMany) {
  Start();
  std::shared_ptr<grpc::Channel> first = Channel();
  const std::shared_ptr<grpc::Channel> second = Channel(), third = Channel();
  for (const auto& channel : {first, second, first}) EXPECT_TRUE(Call(channel).ok());
  const grpc::Status status = Call(third);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), ::testing::HasSubstr("--max_connections_per_client"));
  EXPECT_EQ(refused("max_connections_per_client"), 1);
  EXPECT_TRUE(Call(second).ok());
  first.reset();
  EXPECT_TRUE(testing::WaitUntil([&] { return Call(third).ok(); }));
}

// A connection makes room: its client opens it again with the next call, which succeeds.
TEST_P(ClientConnectionsRpcTest, AClientDoesNotSeeThatItsIdleConnectionMadeRoom) {
  Start(/*max_per_host=*/1);
  const std::shared_ptr<grpc::Channel> first = Channel(), second = Channel();
  const std::shared_ptr<grpc::Channel> turns[] = {first, second, first};
  double calls = 0;
  for (const auto& channel : turns) {
    // The connection of the last turn is idle, unless the server is late to see the end of its
    // call.
    ASSERT_TRUE(testing::WaitUntil([&] {
      fake_clock_.Advance(Door::kIdleAfter);
      return Call(channel, std::chrono::seconds(5)).ok();
    }));
    ++calls;
    ASSERT_TRUE(testing::WaitUntil(
        [&] { return testing::CounterOf(*metrics_, "grpc_server_handled_total", "OK") == calls; }));
    const auto& other = channel == first ? second : first;
    ASSERT_TRUE(testing::WaitUntil([&] { return other->GetState(false) == GRPC_CHANNEL_IDLE; }));
  }
  EXPECT_EQ(refused("made_room"), 2);
}

INSTANTIATE_TEST_SUITE_P(Addresses, ClientConnectionsRpcTest,
                         ::testing::Values("127.0.0.1:0", "[::1]:0", "0.0.0.0:0", "unix"),
                         [](const auto& param) {
                           const std::string address = param.param;
                           return address[0] == '['   ? "v6"
                                  : address[0] == '0' ? "any"
                                  : address[0] == '1' ? "v4"
                                                      : "unix";
                         });

}  // namespace
}  // namespace flashcore::server
