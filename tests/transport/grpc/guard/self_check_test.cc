#include "server/transport/grpc/guard/self_check.h"

#include <chrono>
#include <future>
#include <memory>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "grpcpp/ext/health_check_service_server_builder_option.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

// Keeps gRPC's threads, one for each call, until it is told to end.
class Stuck : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    end_.WaitForNotification();
    auto* const reactor = new Reactor;
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
  void End() { end_.Notify(); }

 private:
  struct Reactor : grpc::ServerGenericBidiReactor {
    void OnDone() override { delete this; }
  };
  absl::Notification end_;
};

TEST(SelfCheckTest, TellsWhenNoThreadOfGrpcIsLeft) {
  Stuck stuck;
  grpc::ServerBuilder builder;
  // Other tests of this process may have enabled gRPC's own.
  builder.SetOption(std::make_unique<grpc::HealthCheckServiceServerBuilderOption>(nullptr));
  builder.RegisterCallbackGenericService(&stuck);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  std::promise<absl::Status> dead;
  SelfCheck::Options options;
  options.interval = std::chrono::milliseconds(1);
  options.timeout = std::chrono::milliseconds(10);
  options.failures = 20;  // calls; there are fewer threads
  options.on_dead = [&](const absl::Status& why) { dead.set_value(why); };
  {
    const SelfCheck check(options, server.get());
    EXPECT_EQ(dead.get_future().get().code(), absl::StatusCode::kUnavailable);
    stuck.End();
  }
  server->Shutdown();
}

}  // namespace
}  // namespace flashcore::server
