// HoldLease over gRPC: how a lease begins and ends, and what its end does.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/transport/gated_server.h"

namespace flashcore::server {
namespace {

using ::testing::StartsWith;
using Stub = v1::AttentionService::Stub;

class HoldLeaseTest : public testing::GatedServerTest {
 protected:
  // Calls as `client`: its name, and its token where the server asks for tokens.
  static void CallAs(const std::string& client, grpc::ClientContext* context) {
    if (client.empty()) return;
    context->AddMetadata("flashcore-client", client);
    context->AddMetadata("authorization", "Bearer " + client);
  }

  // A lease that is held until it is destroyed. `client`: see CallAs.
  struct Lease {
    explicit Lease(Stub* stub, const std::string& client = "") {
      CallAs(client, &context);
      reader = stub->HoldLease(&context, {});
      v1::HoldLeaseResponse response;
      if (reader->Read(&response)) id = response.lease_id();
    }
    ~Lease() { context.TryCancel(); }

    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<v1::HoldLeaseResponse>> reader;
    std::string id;  // empty: it was refused
  };

  grpc::Status TryCreate(const std::string& lease, const std::string& client = "",
                         v1::CreateSequenceResponse* response = nullptr) {
    v1::CreateSequenceRequest request = testing::CreateRequest();
    request.set_lease_id(lease);
    grpc::ClientContext context;
    CallAs(client, &context);
    v1::CreateSequenceResponse ignored;
    return stub_->CreateSequence(&context, request, response == nullptr ? &ignored : response);
  }
  std::string CreateLeased(const std::string& lease) {
    v1::CreateSequenceResponse response;
    EXPECT_TRUE(TryCreate(lease, "", &response).ok());
    EXPECT_TRUE(response.sequence().leased());
    return response.sequence_id();
  }
  [[nodiscard]] bool WaitForSequences(size_t count) {
    return testing::WaitUntil([&] { return engine_->sequences().stats().sequences == count; });
  }
};

TEST_F(HoldLeaseTest, ItsCancellationDeletesItsSequences) {
  StartFake();
  const std::string kept = Create();
  auto lease = std::make_unique<Lease>(stub_.get());
  ASSERT_EQ(lease->id.size(), 16u);
  const std::string leased = CreateLeased(lease->id);
  ASSERT_TRUE(Attend(testing::StepRequest({leased})).ok());
  v1::ManageSequencesRequest manage;
  auto& fork = *manage.add_operations()->mutable_fork();
  fork.set_sequence_id(kept);
  fork.set_lease_id(lease->id);
  manage.add_operations()->mutable_fork()->set_sequence_id(leased);
  v1::ManageSequencesResponse managed;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->ManageSequences(&context, manage, &managed).ok());
  ASSERT_EQ(managed.results_size(), 2);
  EXPECT_TRUE(managed.results(0).sequence().leased());
  EXPECT_FALSE(managed.results(1).sequence().leased()) << "nothing is inherited";
  EXPECT_TRUE(WaitForSequences(4));
  const std::string id = lease->id;
  lease->context.TryCancel();
  EXPECT_EQ(lease->reader->Finish().error_code(), grpc::CANCELLED);
  ASSERT_TRUE(WaitForSequences(2));
  EXPECT_EQ(Length(kept), 0u);
  EXPECT_EQ(Length(managed.results(1).sequence().sequence_id()), 1u);
  const grpc::Status late = TryCreate(id);
  EXPECT_EQ(late.error_code(), grpc::NOT_FOUND);
  EXPECT_THAT(late.error_message(), StartsWith("lease_id: "));
}

TEST_F(HoldLeaseTest, TheRevocationOfItsTokenDeletesItsSequences) {
  // SHA-256 of "abc" and of "secret".
  const std::string kept =
      "bob:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b:\n";
  const std::string revoked =
      "alice:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad:\n";
  Server::Options options = testing::ServerOptions();
  std::string& tokens = options.credentials.token_file;
  tokens = absl::StrCat(::testing::TempDir(), "hold_lease_tokens.", getpid());
  std::ofstream(tokens) << kept << revoked;
  clock_ = &fake_clock_;  // the file is read when asked
  StartFake({}, options);
  Lease alice(stub_.get(), "abc");
  const Lease bob(stub_.get(), "secret");
  ASSERT_TRUE(TryCreate(alice.id, "abc").ok());
  ASSERT_TRUE(TryCreate(bob.id, "secret").ok());
  std::ofstream(tokens) << kept;
  server_->ReloadCredentials();
  EXPECT_EQ(alice.reader->Finish().error_code(), grpc::UNAUTHENTICATED);
  EXPECT_TRUE(WaitForSequences(1));
  EXPECT_TRUE(TryCreate(bob.id, "secret").ok());
  std::filesystem::remove(tokens);
}

TEST_F(HoldLeaseTest, IsOfItsClient) {
  StartFake();
  const Lease alice(stub_.get(), "alice"), bob(stub_.get(), "bob");
  ASSERT_FALSE(alice.id.empty());
  ASSERT_NE(alice.id, bob.id);
  const grpc::Status unknown = TryCreate(std::string(16, 'x'), "alice");
  EXPECT_EQ(unknown.error_code(), grpc::NOT_FOUND);
  const grpc::Status foreign = TryCreate(bob.id, "alice");
  EXPECT_EQ(foreign.error_code(), grpc::NOT_FOUND);
  EXPECT_EQ(foreign.error_message(), unknown.error_message());
  EXPECT_TRUE(TryCreate(alice.id, "alice").ok());
  const grpc::Status malformed = TryCreate("short", "alice");
  EXPECT_EQ(malformed.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(malformed.error_message(), "lease_id: 5 bytes; an id has 16");
}

// Times and requests in flight would say nothing if they counted how long leases are held.
TEST_F(HoldLeaseTest, CountsAsTheRequestThatOpensIt) {
  StartFake();
  const Lease first(stub_.get()), second(stub_.get());
  EXPECT_TRUE(testing::WaitUntil([&] { return Requests("HoldLease", "grpc") == 2; }));
  EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->inflight_requests.Value() == 0; }));
}

TEST_F(HoldLeaseTest, OutlivesTheTimeoutOfReplies) {
  clock_ = &fake_clock_;
  Server::Options options = testing::ServerOptions();
  options.unsent_replies.timeout = std::chrono::seconds(10);
  StartFake({}, options);
  const Lease lease(stub_.get());
  CreateLeased(lease.id);
  ASSERT_TRUE(testing::WaitUntil([&] { return Requests("HoldLease", "grpc") == 1; }));
  for (int i = 0; i < 100; ++i) fake_clock_.Advance(std::chrono::seconds(1));
  CreateLeased(lease.id);
  EXPECT_EQ(engine_->sequences().stats().sequences, 2u);
}

TEST_F(HoldLeaseTest, ADrainEndsItAndAnswersItsRequests) {
  StartFake();
  Lease lease(stub_.get());
  const std::string running_on = CreateLeased(lease.id), queued_on = CreateLeased(lease.id);
  gate_.SetOpen(false);
  const auto running = Send(testing::StepRequest({running_on}));
  ASSERT_TRUE(WaitForArrived(1));
  const auto queued = Send(testing::StepRequest({queued_on}));
  ASSERT_TRUE(WaitForQueued(1));
  auto drained = std::async(std::launch::async,
                            [&] { return server_->Drain(absl::FromChrono(testing::kLong)); });
  v1::HoldLeaseResponse none;
  EXPECT_FALSE(lease.reader->Read(&none));
  EXPECT_EQ(lease.reader->Finish().error_code(), grpc::UNAVAILABLE);
  const Lease refused(stub_.get());
  EXPECT_EQ(refused.id, "");
  EXPECT_EQ(refused.reader->Finish().error_code(), grpc::UNAVAILABLE);
  gate_.SetOpen(true);
  EXPECT_TRUE(drained.get());
  EXPECT_TRUE(running->status.get().ok());
  EXPECT_TRUE(queued->status.get().ok());
}

TEST_F(HoldLeaseTest, NoSequenceOutlivesItHoweverTheyRace) {
  StartFake();
  for (int round = 0; round < 20; ++round) {
    auto lease = std::make_unique<Lease>(stub_.get());
    ASSERT_FALSE(lease->id.empty());
    std::vector<std::thread> makers;
    for (int i = 0; i < 3; ++i) {
      makers.emplace_back([this, id = lease->id] {
        grpc::Status status;
        do {
          status = TryCreate(id);
        } while (status.ok());
        EXPECT_EQ(status.error_code(), grpc::NOT_FOUND) << status.error_message();
      });
    }
    ASSERT_TRUE(testing::WaitUntil([&] { return engine_->sequences().stats().sequences > 0; }));
    lease.reset();
    for (std::thread& maker : makers) maker.join();
    ASSERT_TRUE(WaitForSequences(0));
  }
}

}  // namespace
}  // namespace flashcore::server
