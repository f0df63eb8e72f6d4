#include "server/transport/access/client_connections.h"

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "flashcore/v1/attention.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "gtest/gtest.h"
#include "tests/base/has_info.h"
#include "tests/engine/fakes.h"
#include "tests/transport/rpc_setup.h"

namespace flashcore::server {
namespace {

TEST(ClientConnectionsTest, AConnectionCountsOncePerClientUntilItEnds) {
  ClientConnections connections(1);
  const uint64_t first = connections.Open("fd:1", {});
  connections.Open("fd:2", {});
  EXPECT_TRUE(connections.Use("fd:1", "alice").ok());
  EXPECT_TRUE(connections.Use("fd:1", "alice").ok());
  EXPECT_TRUE(connections.Use("fd:1", "bob").ok());
  const absl::Status refused = connections.Use("fd:2", "alice");
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(refused, testing::HasInfo("QUOTA_EXCEEDED", {{"limit", "max_connections_per_client"},
                                                           {"needed", "1"},
                                                           {"used", "1"},
                                                           {"allowed", "1"}}));
  EXPECT_TRUE(connections.Use("fd:2", "carol").ok());
  connections.Close("fd:1", first);
  EXPECT_TRUE(connections.Use("fd:2", "alice").ok());
}

TEST(ClientConnectionsTest, AnUnknownConnectionDoesNotCount) {
  ClientConnections connections(1);
  for (const char* peer : {"unix:", "ipv4:127.0.0.1:9", "inproc"}) {
    EXPECT_TRUE(connections.Use(peer, "alice").ok());
  }
  connections.Close("ipv4:127.0.0.1:9", 9);
}

TEST(ClientConnectionsTest, KnowsWhoIsAtTheOtherEndUntilTheConnectionEnds) {
  ClientConnections connections(1);
  const uint64_t first = connections.Open("fd:1", {"unix:", uid_t{7}});
  EXPECT_EQ(connections.Find("fd:1")->user, uid_t{7});
  EXPECT_EQ(connections.Find("fd:1")->address, "unix:");
  connections.Close("fd:1", first);
  EXPECT_TRUE(absl::IsUnavailable(connections.Find("fd:1").status()));
  EXPECT_EQ(connections.Find("inproc")->address, "inproc");
  EXPECT_EQ(connections.Find("inproc")->user, std::nullopt);
}

// gRPC closes its descriptor, and the next connection gets it, before the end of the first is seen.
TEST(ClientConnectionsTest, ANameThatIsTakenAgainIsTheNewConnections) {
  ClientConnections connections(1);
  const uint64_t first = connections.Open("fd:1", {"unix:", uid_t{7}});
  EXPECT_TRUE(connections.Use("fd:1", "alice").ok());
  connections.Open("fd:1", {"unix:", uid_t{8}});
  connections.Open("fd:2", {});
  EXPECT_TRUE(connections.Use("fd:2", "alice").ok());  // the first does not count any more
  connections.Close("fd:1", first);
  EXPECT_EQ(connections.Find("fd:1")->user, uid_t{8});
}

// Through gRPC, which names the peers.
class ClientConnectionsRpcTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    Server::Options options = testing::ServerOptions();
    options.listen = {GetParam()};
    if (options.listen[0] == "unix") {
      options.listen[0] = absl::StrCat("unix:", ::testing::TempDir(), "/connections.", getpid());
    }
    options.connections.max_per_client = 2;
    metrics_ = std::make_unique<Metrics>(testing::FakeMetricsOptions(Server::Methods(options)));
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(std::make_unique<testing::FakeDevice>(&device_));
    fleet_ = std::make_unique<Fleet>(Engine::Options(), std::move(devices), &steady_clock_,
                                     metrics_.get());
    auto server = Server::Start(options, fleet_.get(), metrics_.get());
    ASSERT_EQ(server.status(), absl::OkStatus());
    server_ = *std::move(server);
  }

  std::shared_ptr<grpc::Channel> Connect() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
    return grpc::CreateCustomChannel(server_->addresses()[0], grpc::InsecureChannelCredentials(),
                                     arguments);
  }
  static grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel) {
    grpc::ClientContext context;
    v1::GetServerInfoResponse info;
    return v1::AttentionService::NewStub(channel)->GetServerInfo(&context, {}, &info);
  }
  double refused() const {
    for (const auto& family : metrics_->Collect()) {
      if (family.name != "flashcore_connections_refused_total") continue;
      for (const auto& metric : family.metric) {
        if (metric.label[0].value == "max_connections_per_client") return metric.counter.value;
      }
    }
    return -1;
  }

  testing::FakeDeviceControl device_;
  SteadyClock steady_clock_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<Fleet> fleet_;
  std::unique_ptr<Server> server_;
};

TEST_P(ClientConnectionsRpcTest, RefusesCallsOnOneConnectionTooMany) {
  std::shared_ptr<grpc::Channel> first = Connect();
  const std::shared_ptr<grpc::Channel> second = Connect(), third = Connect();
  for (const auto& channel : {first, second, first}) EXPECT_TRUE(Call(channel).ok());
  const grpc::Status status = Call(third);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), ::testing::HasSubstr("--max_connections_per_client"));
  EXPECT_EQ(refused(), 1);
  EXPECT_TRUE(Call(second).ok());
  first.reset();
  EXPECT_TRUE(testing::WaitUntil([&] { return Call(third).ok(); }));
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
