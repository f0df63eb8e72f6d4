// A server in this process whose device waits at a gate, and its clients.
#ifndef FLASHCORE_TESTS_TRANSPORT_GATED_SERVER_H_
#define FLASHCORE_TESTS_TRANSPORT_GATED_SERVER_H_

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "flashcore/v1/attention.grpc.pb.h"
#include "grpcpp/create_channel.h"
#include "gtest/gtest.h"
#include "tests/engine/fakes.h"
#include "tests/transport/gated_device.h"
#include "tests/transport/rpc_setup.h"

namespace flashcore::server::testing {

class GatedServerTest : public ::testing::Test {
 protected:
  ~GatedServerTest() override {
    gate_.SetOpen(true);
    server_.reset();
    fleet_.reset();
  }

  void Start(std::unique_ptr<Device> device, const Engine::Options& engine = {},
             const Server::Options& options = ServerOptions()) {
    metrics_ = std::make_unique<Metrics>(FakeMetricsOptions(Server::Methods(options)));
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(std::make_unique<GatedDevice>(std::move(device), &gate_));
    fleet_ = std::make_unique<Fleet>(engine, std::move(devices), clock_, metrics_.get());
    engine_ = fleet_->engines()[0].get();
    server_ = Server::Start(options, fleet_.get(), metrics_.get()).value();
    stub_ = Connect();
  }
  // On a device that copies Q to O.
  void StartFake(const Engine::Options& engine = {},
                 const Server::Options& options = ServerOptions()) {
    FakeDevice::Options device;
    device.kv_memory_bytes = 8 << 20;
    Start(std::make_unique<FakeDevice>(&fake_, device), engine, options);
  }

  // A connection of its own.
  std::shared_ptr<grpc::Channel> Channel(grpc::ChannelArguments arguments = {}) const {
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(server_->addresses()[0], grpc::InsecureChannelCredentials(),
                                     arguments);
  }
  std::unique_ptr<v1::AttentionService::Stub> Connect(
      const grpc::ChannelArguments& arguments = {}) const {
    return v1::AttentionService::NewStub(Channel(arguments));
  }

  // An Attend on its way. `client` is the name that the request carries; empty: none.
  struct Call {
    ~Call() { context.TryCancel(); }

    grpc::ClientContext context;
    v1::AttendResponse response;
    std::future<grpc::Status> status;
  };
  std::unique_ptr<Call> Send(v1::AttendRequest request, const std::string& client = "",
                             std::chrono::milliseconds timeout = 10 * kLong) {
    auto call = std::make_unique<Call>();
    call->context.set_deadline(std::chrono::system_clock::now() + timeout);
    if (!client.empty()) call->context.AddMetadata("flashcore-client", client);
    call->status = std::async(std::launch::async,
                              [stub = stub_.get(), request = std::move(request), to = call.get()] {
                                return stub->Attend(&to->context, request, &to->response);
                              });
    return call;
  }
  [[nodiscard]] static bool WaitForEnd(const Call& call) {
    return call.status.wait_for(kLong) == std::future_status::ready;
  }
  grpc::Status Attend(const v1::AttendRequest& request, v1::AttendResponse* response = nullptr) {
    grpc::ClientContext context;
    v1::AttendResponse ignored;
    return stub_->Attend(&context, request, response == nullptr ? &ignored : response);
  }

  std::string Create(const v1::CreateSequenceRequest& request = CreateRequest()) {
    v1::CreateSequenceResponse response;
    grpc::ClientContext context;
    const grpc::Status status = stub_->CreateSequence(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.sequence_id();
  }
  uint64_t Length(const std::string& id) const {
    return engine_->sequences()
        .Get(*SequenceId::FromBytes(id), testing::kLoopback)
        ->layer_lengths[0];
  }

  [[nodiscard]] bool WaitForQueued(int requests) const {
    return WaitUntil([&] { return engine_->queued() == requests; });
  }
  [[nodiscard]] bool WaitForArrived(size_t launches) const {
    return WaitUntil([&] { return gate_.arrived() >= launches; });
  }
  [[nodiscard]] bool AllStagingReturns() const {
    return WaitUntil([&] { return engine_->staging().used_bytes() == 0; });
  }
  // Requests of a method over a transport: how many count in flashcore_request_duration_seconds.
  double Requests(const char* method, const char* transport) const {
    bool found = false;
    double requests = 0;
    for (const auto& family : metrics_->Collect()) {
      if (family.name != "flashcore_request_duration_seconds") continue;
      for (const auto& metric : family.metric) {
        const auto has = [&](const char* name, const char* value) {
          return std::any_of(metric.label.begin(), metric.label.end(), [&](const auto& label) {
            return label.name == name && label.value == value;
          });
        };
        if (!has("rpc", method) || !has("transport", transport)) continue;
        found = true;
        requests += static_cast<double>(metric.histogram.sample_count);
      }
    }
    EXPECT_TRUE(found) << method;
    return requests;
  }

  Gate gate_;
  FakeDeviceControl fake_;
  SteadyClock steady_clock_;
  FakeClock fake_clock_;
  const Clock* clock_ = &steady_clock_;  // of the server
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<Fleet> fleet_;
  Engine* engine_ = nullptr;  // of its only device
  std::unique_ptr<Server> server_;
  std::unique_ptr<v1::AttentionService::Stub> stub_;
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_TRANSPORT_GATED_SERVER_H_
