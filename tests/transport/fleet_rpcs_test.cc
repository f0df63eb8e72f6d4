// The RPCs of a server that computes on two devices.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "flashcore/v1/attention.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "gtest/gtest.h"
#include "server/transport/server.h"
#include "tests/engine/fakes.h"
#include "tests/transport/rpc_setup.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using testing::FakeDevice;
using testing::FakeDeviceControl;
using ::testing::HasSubstr;
using testing::kRowBytes;

constexpr size_t kKvBytes = 8 << 20;

class FleetRpcsTest : public ::testing::Test {
 protected:
  FleetRpcsTest() {
    const Server::Options options = testing::ServerOptions();
    Metrics::Options metrics = {"test", {}, Server::Methods(options)};
    std::vector<std::unique_ptr<Device>> devices;
    for (const char* id : {"fake:0", "fake:1"}) {
      FakeDevice::Options fake;
      fake.id = id;
      fake.kv_memory_bytes = kKvBytes;
      devices.push_back(std::make_unique<FakeDevice>(&device_, fake));
      metrics.devices.push_back({id, "fake", "fake"});
    }
    metrics_ = std::make_unique<Metrics>(metrics);
    fleet_ =
        std::make_unique<Fleet>(Engine::Options(), std::move(devices), &clock_, metrics_.get());
    server_ = Server::Start(options, fleet_.get(), metrics_.get()).value();
    stub_ = v1::AttentionService::NewStub(
        grpc::CreateChannel(server_->addresses()[0], grpc::InsecureChannelCredentials()));
  }

  grpc::Status Create(const std::string& device_id, v1::SequenceInfo* sequence) {
    v1::CreateSequenceRequest request = testing::CreateRequest();
    request.set_device_id(device_id);
    v1::CreateSequenceResponse response;
    grpc::ClientContext context;
    grpc::Status status = stub_->CreateSequence(&context, request, &response);
    *sequence = response.sequence();
    return status;
  }
  v1::SequenceInfo Create(const std::string& device_id) {
    v1::SequenceInfo sequence;
    EXPECT_TRUE(Create(device_id, &sequence).ok());
    return sequence;
  }

  v1::SequenceInfo Get(const std::string& id) {
    v1::GetSequenceRequest request;
    request.set_sequence_id(id);
    v1::GetSequenceResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(stub_->GetSequence(&context, request, &response).ok());
    return response.sequence();
  }

  grpc::Status Attend(const std::vector<std::string>& ids) {
    v1::AttendResponse response;
    grpc::ClientContext context;
    return stub_->Attend(&context, testing::StepRequest(ids), &response);
  }

  FakeDeviceControl device_;  // of both
  SteadyClock clock_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<Fleet> fleet_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<v1::AttentionService::Stub> stub_;
};

TEST_F(FleetRpcsTest, TellsOfEveryDevice) {
  ASSERT_TRUE(Attend({Create("fake:1").sequence_id()}).ok());
  v1::GetServerInfoResponse info;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
  ASSERT_EQ(info.devices_size(), 2);
  EXPECT_EQ(info.devices(0).id(), "fake:0");
  EXPECT_EQ(info.devices(0).kv_memory_bytes(), kKvBytes);
  EXPECT_EQ(info.devices(0).kv_used_bytes(), 0u);
  EXPECT_EQ(info.devices(1).id(), "fake:1");
  EXPECT_GT(info.devices(1).kv_used_bytes(), 0u);
  const size_t kernels = fleet_->engines()[0]->device().kernels().size();
  EXPECT_EQ(static_cast<size_t>(info.kernels_size()), kernels);  // each once, though both have it
}

TEST_F(FleetRpcsTest, ASequenceStaysOnTheDeviceThatWasAskedFor) {
  for (const std::string device : {"fake:0", "fake:1"}) {
    const v1::SequenceInfo sequence = Create(device);
    EXPECT_EQ(sequence.device_id(), device);
    ASSERT_TRUE(Attend({sequence.sequence_id()}).ok());

    v1::ForkSequenceRequest fork;
    fork.set_sequence_id(sequence.sequence_id());
    v1::ForkSequenceResponse forked;
    grpc::ClientContext context;
    ASSERT_TRUE(stub_->ForkSequence(&context, fork, &forked).ok());
    EXPECT_EQ(forked.sequence().device_id(), device);
    EXPECT_TRUE(Attend({sequence.sequence_id(), forked.sequence_id()}).ok());

    const v1::SequenceInfo info = Get(forked.sequence_id());
    EXPECT_EQ(info.device_id(), device);
    EXPECT_THAT(info.layer_lengths(), ElementsAre(2));
  }
}

TEST_F(FleetRpcsTest, TheServerSpreadsSequencesThatMayBeAnywhere) {
  EXPECT_EQ(Create("").device_id(), "fake:0");
  EXPECT_EQ(Create("").device_id(), "fake:1");
}

TEST_F(FleetRpcsTest, ADeviceThatThereIsNotIsInvalid) {
  v1::SequenceInfo sequence;
  const grpc::Status status = Create("cuda:7", &sequence);
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "device_id: 'cuda:7' is not one of fake:0, fake:1");
}

TEST_F(FleetRpcsTest, SequencesOfTwoDevicesInOneRequestAreInvalid) {
  const std::string a = Create("fake:0").sequence_id();
  const std::string b = Create("fake:1").sequence_id();
  const grpc::Status status = Attend({a, b});
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("must be on one device"));
  EXPECT_THAT(Get(a).layer_lengths(), ElementsAre(0));
  EXPECT_THAT(Get(b).layer_lengths(), ElementsAre(0));
}

TEST_F(FleetRpcsTest, LoadsTruncatesAndDeletesOnTheSecondDevice) {
  const std::string id = Create("fake:1").sequence_id();
  v1::LoadSequenceRequest chunk;
  chunk.set_sequence_id(id);
  chunk.set_layout(v1::LAYOUT_NHD);
  chunk.set_rows(5);
  chunk.set_key(std::string(5 * kRowBytes, '\0'));
  chunk.set_value(std::string(5 * kRowBytes, '\0'));
  grpc::ClientContext load_context;
  v1::LoadSequenceResponse loaded;
  auto writer = stub_->LoadSequence(&load_context, &loaded);
  writer->Write(chunk);
  writer->WritesDone();
  ASSERT_TRUE(writer->Finish().ok());
  EXPECT_EQ(loaded.sequence().device_id(), "fake:1");
  EXPECT_THAT(loaded.sequence().layer_lengths(), ElementsAre(5));

  v1::TruncateSequenceRequest truncate;
  truncate.set_sequence_id(id);
  truncate.set_length(2);
  v1::TruncateSequenceResponse truncated;
  grpc::ClientContext truncate_context;
  ASSERT_TRUE(stub_->TruncateSequence(&truncate_context, truncate, &truncated).ok());
  EXPECT_EQ(truncated.sequence().device_id(), "fake:1");
  EXPECT_THAT(truncated.sequence().layer_lengths(), ElementsAre(2));

  v1::DeleteSequenceRequest remove;
  remove.set_sequence_id(id);
  v1::DeleteSequenceResponse removed;
  grpc::ClientContext delete_context;
  ASSERT_TRUE(stub_->DeleteSequence(&delete_context, remove, &removed).ok());
  EXPECT_EQ(Attend({id}).error_code(), grpc::NOT_FOUND);
}

TEST_F(FleetRpcsTest, ManagesSequencesOfBothDevicesInOneCall) {
  v1::ManageSequencesRequest request;
  for (const char* device : {"fake:0", "fake:1", "cuda:7"}) {
    *request.add_operations()->mutable_create() = testing::CreateRequest();
    request.mutable_operations()->rbegin()->mutable_create()->set_device_id(device);
  }
  for (const char* device : {"fake:0", "fake:1"}) {
    request.add_operations()->mutable_fork()->set_sequence_id(Create(device).sequence_id());
  }
  grpc::ClientContext context;
  v1::ManageSequencesResponse response;
  ASSERT_TRUE(stub_->ManageSequences(&context, request, &response).ok());
  std::vector<std::string> devices;
  for (const auto& result : response.results()) devices.push_back(result.sequence().device_id());
  EXPECT_THAT(devices, ElementsAre("fake:0", "fake:1", "", "fake:0", "fake:1"));
  EXPECT_EQ(response.results(2).status().code(), grpc::INVALID_ARGUMENT);
}

TEST_F(FleetRpcsTest, ListsPageByPageOverBothDevices) {
  std::vector<std::string> all;
  for (const char* device : {"fake:0", "fake:0", "fake:1"}) {
    all.push_back(Create(device).sequence_id());
  }
  std::vector<std::string> listed;
  v1::ListSequencesRequest request;
  request.set_page_size(2);
  do {
    grpc::ClientContext context;
    v1::ListSequencesResponse response;
    ASSERT_TRUE(stub_->ListSequences(&context, request, &response).ok());
    for (const v1::SequenceInfo& info : response.sequences()) listed.push_back(info.sequence_id());
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty() && listed.size() < 10);
  EXPECT_EQ(listed, all);
}

}  // namespace
}  // namespace flashcore::server
