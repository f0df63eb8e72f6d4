// ClientOptions::lease: when a lease is opened, what names it, and when it ends.
#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "flashcore/client.h"
#include "flashcore/sequence.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_local_server.h"
#include "tests/client/sequence_fixture.h"

namespace flashcore {
namespace {

grpc::Status LeaseLost() {
  v1::ErrorInfo info;
  info.set_reason("LEASE_LOST");
  info.set_domain("flashcore");
  v1::Status status;
  status.set_code(grpc::StatusCode::NOT_FOUND);
  v1::StatusDetail* const detail = status.add_details();
  detail->set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
  detail->set_value(info.SerializeAsString());
  return {grpc::StatusCode::NOT_FOUND, "lease_id: no such lease", status.SerializeAsString()};
}

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;
using Op = SequenceOperation;

class LeaseTest : public SequenceTest {
 protected:
  LeaseTest() {
    server_.on_lease = [this](grpc::ServerContext* context, FakeServer::LeaseWriter* writer) {
      return Hold(context, writer);
    };
    server_.on_create = [this, answer = server_.on_create](auto* context, const auto& request,
                                                           auto* response) {
      const grpc::Status status = Check(request.lease_id());
      return status.ok() ? answer(context, request, response) : status;
    };
    server_.on_fork = [this, answer = server_.on_fork](auto* context, const auto& request,
                                                       auto* response) {
      const grpc::Status status = Check(request.lease_id());
      return status.ok() ? answer(context, request, response) : status;
    };
    client_ = Leasing();
  }
  ~LeaseTest() override {
    client_.reset();
    WaitForEnds(opened());  // its handlers use the members
  }

  std::unique_ptr<Client> Leasing() const {
    ClientOptions options = Options();
    options.lease = true;
    return *Client::Create(server_.target(), options);
  }

  grpc::Status Hold(grpc::ServerContext* context, FakeServer::LeaseWriter* writer) {
    v1::HoldLeaseResponse response;
    {
      absl::MutexLock lock(&mutex_);
      response.set_lease_id(absl::StrCat("lease ", ++opened_));
      open_.insert(response.lease_id());
    }
    writer->Write(response);
    bool ended = false;
    while (!ended && !context->IsCancelled()) {
      absl::SleepFor(absl::Milliseconds(1));
      absl::MutexLock lock(&mutex_);
      ended = open_.count(response.lease_id()) == 0;
    }
    absl::MutexLock lock(&mutex_);
    open_.erase(response.lease_id());
    ++ended_;
    return {grpc::StatusCode::UNAVAILABLE, "draining"};
  }
  // The server's answer to a request that names the lease.
  grpc::Status Check(const std::string& lease) {
    absl::MutexLock lock(&mutex_);
    named_.push_back(lease);
    if (lease.empty() || open_.count(lease) > 0) return grpc::Status::OK;
    return LeaseLost();
  }

  std::vector<std::string> named() {
    absl::MutexLock lock(&mutex_);
    return named_;
  }
  int opened() {
    absl::MutexLock lock(&mutex_);
    return opened_;
  }
  // The server ends all leases. `told`: waits until their calls have ended.
  void EndLeases(bool told) {
    absl::MutexLock lock(&mutex_);
    open_.clear();
    if (told) AwaitEnds(opened_);
  }
  void WaitForEnds(int count) {
    absl::MutexLock lock(&mutex_);
    AwaitEnds(count);
  }
  void AwaitEnds(int count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto ends = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ended_ >= count; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&ends), absl::Minutes(1)));
  }

  absl::Mutex mutex_;
  int opened_ ABSL_GUARDED_BY(mutex_) = 0;  // so far
  int ended_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<std::string> open_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> named_ ABSL_GUARDED_BY(mutex_);  // by creates and forks, in their order
};

TEST_F(LeaseTest, EverySequenceThatTheClientMakesNamesIt) {
  ASSERT_TRUE(client_->GetServerInfo().ok());
  EXPECT_EQ(opened(), 0) << "before the first sequence";
  const Sequence sequence = Create();
  const Sequence fork = *sequence.Fork();
  ASSERT_TRUE(sequence.Info().ok());
  const auto results = client_->ManageSequences(
      {Op::Create(SmallShape()), Op::Info(fork), Op::Fork(fork), Op::Delete(fork)});
  ASSERT_TRUE(results.ok()) << results.status();
  for (const SequenceResult& result : *results) EXPECT_TRUE(result.sequence.ok());
  EXPECT_THAT(named(), AllOf(SizeIs(4), Each("lease 1")));
  EXPECT_EQ(opened(), 1);
}

// Between a request that names a lease and its answer, the lease may end and another thread open
// the next one.
TEST_F(LeaseTest, ALateAnswerThatALeaseIsLostLeavesTheNextOne) {
  std::atomic<int> creates{0};
  server_.on_create = [&, answer = server_.on_create](auto* context, const auto& request,
                                                      auto* response) {
    if (creates++ > 0) return answer(context, request, response);
    EndLeases(/*told=*/true);
    Create();
    return LeaseLost();
  };
  Create();
  EXPECT_EQ(opened(), 2);
  EXPECT_EQ(named().back(), "lease 2");
}

TEST_F(LeaseTest, AClientWithoutItHasNone) {
  client_ = *Client::Create(server_.target(), Options());
  ASSERT_TRUE(Create().Fork().ok());
  ASSERT_TRUE(client_->ManageSequences({Op::Create(SmallShape())}).ok());
  EXPECT_THAT(named(), AllOf(SizeIs(3), Each("")));
  EXPECT_EQ(opened(), 0);
}

TEST_F(LeaseTest, EndsWithTheClientAndItsHandles) {
  auto sequence = std::make_unique<Sequence>(Create());
  client_.reset();
  ASSERT_TRUE(sequence->Fork().ok()) << "a handle may outlive its client";
  sequence.reset();
  WaitForEnds(1);
}

TEST_F(LeaseTest, OpensAnotherWhenItHasEnded) {
  const Sequence sequence = Create();
  EndLeases(/*told=*/true);
  // The end may still be on its way to the client. Then the server refuses the old lease.
  Create();
  EndLeases(/*told=*/true);
  ASSERT_TRUE(sequence.Fork().ok());
  EXPECT_EQ(named().back(), "lease 3");
  EXPECT_EQ(opened(), 3);
}

TEST_F(LeaseTest, OpensAnotherWhenTheServerDoesNotKnowIt) {
  const Sequence sequence = Create();
  std::atomic<int> lost{1};
  server_.on_fork = [&, answer = server_.on_fork](auto* context, const auto& request,
                                                  auto* response) {
    if (lost-- > 0) {
      return LeaseLost();
    }
    return answer(context, request, response);
  };
  ASSERT_TRUE(sequence.Fork().ok());
  EXPECT_THAT(named(), ElementsAre("lease 1", "lease 2"));
  lost = 1;
  const auto results = client_->ManageSequences({Op::Fork(sequence), Op::Info(sequence)});
  ASSERT_TRUE(results.ok());
  EXPECT_TRUE(absl::IsNotFound((*results)[0].sequence.status()));
  ASSERT_TRUE(sequence.Fork().ok());
  EXPECT_EQ(named().back(), "lease 3");
  lost = 1000;
  Sequence(sequence).OnLost([](const SequenceOptions&) -> absl::StatusOr<Sequence> {
    return absl::InternalError("the sequence is not lost");
  });
  const absl::Status status = sequence.Fork().status();
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_THAT(std::string(status.message()), StartsWith("lease_id:"));
  EXPECT_EQ(lost, 998) << "it tries once more";
}

TEST_F(LeaseTest, OpeningIsRetriedAndItsErrorsAreThoseOfTheCall) {
  std::atomic<int> calls{0};
  std::atomic<bool> has_leases{true};
  server_.on_lease = [&, hold = server_.on_lease](auto* context, auto* writer) {
    if (!has_leases) return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "no such method");
    if (++calls < 3) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "draining");
    return hold(context, writer);
  };
  Create();
  EXPECT_EQ(calls, 3);
  has_leases = false;  // an older server
  client_ = Leasing();
  const absl::Status status = client_->CreateSequence(SmallShape()).status();
  EXPECT_TRUE(absl::IsUnimplemented(status));
  EXPECT_EQ(status.message(), "lease: no such method");
  EXPECT_TRUE(absl::IsUnimplemented(client_->ManageSequences({Op::Create(SmallShape())}).status()));
}

TEST_F(LeaseTest, OpeningEndsWithTheDeadline) {
  server_.on_lease = [this](grpc::ServerContext* context, auto*) {
    while (!context->IsCancelled()) absl::SleepFor(absl::Milliseconds(1));
    absl::MutexLock lock(&mutex_);
    ++ended_;
    return grpc::Status::CANCELLED;
  };
  CallOptions call;
  call.deadline = absl::Now() + absl::Milliseconds(50);
  const absl::Status status = client_->CreateSequence(SmallShape(), call).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(named(), IsEmpty());
  WaitForEnds(1);
}

// Behind a proxy that hashes the affinity, the lease must be where the sequences are.
TEST_F(LeaseTest, SequencesOfAClientHaveItsAffinity) {
  const Sequence first = Create();
  EXPECT_EQ(Create().options().affinity, first.options().affinity);
  EXPECT_THAT(server_.metadata("x-flashcore-sequence"),
              AllOf(SizeIs(3), Each(first.options().affinity)));
  client_ = Leasing();
  SequenceOptions routed = SmallShape();
  routed.affinity = "there";
  Create(routed);
  EXPECT_EQ(Create().options().affinity, "there");
  EXPECT_EQ(server_.metadata("x-flashcore-sequence")[3], "there");
  routed.affinity = "elsewhere";
  EXPECT_EQ(Create(routed).options().affinity, "elsewhere");
}

TEST(LocalLeaseTest, IsThatOfTheConnection) {
  FakeLocalServer server;
  absl::Mutex mutex;
  std::vector<std::string> calls;  // the method, or the lease that it names
  int leases = 0;
  server.on_call = [&](const v1::LocalCall& call, std::string* reply) {
    absl::MutexLock lock(&mutex);
    if (call.method() == "HoldLease") {
      v1::HoldLeaseResponse response;
      response.set_lease_id(absl::StrCat("lease ", ++leases));
      *reply = response.SerializeAsString();
      calls.push_back(call.method());
    } else if (call.method() == "CreateSequence") {
      v1::CreateSequenceRequest request;
      EXPECT_TRUE(request.ParseFromString(call.message()));
      v1::CreateSequenceResponse response;
      response.set_sequence_id(std::string(16, 'x'));
      *reply = response.SerializeAsString();
      calls.push_back(request.lease_id());
    }
    return v1::Status();
  };
  ClientOptions options;
  options.lease = true;
  options.timeout = absl::Minutes(1);
  options.retry.max_attempts = 1000;
  const auto client = *Client::Create(server.target(), options);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(client->CreateSequence(SmallShape()).ok());
  server.Stop();
  server.Start();
  // Unlike a Create, it is sent again if the client has not seen the end of the connection yet.
  ASSERT_TRUE(client->GetServerInfo().ok());
  ASSERT_TRUE(client->CreateSequence(SmallShape()).ok());
  absl::MutexLock lock(&mutex);
  EXPECT_THAT(calls, ElementsAre("HoldLease", "lease 1", "lease 1", "HoldLease", "lease 2"));
}

}  // namespace
}  // namespace flashcore
