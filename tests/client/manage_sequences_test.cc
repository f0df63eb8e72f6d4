// Client::ManageSequences: many operations in one call.
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "flashcore/client.h"
#include "flashcore/sequence.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/sequence_fixture.h"

namespace flashcore {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using Op = SequenceOperation;

class ManageSequencesTest : public SequenceTest {
 protected:
  Sequence CreateWithRows(size_t rows) {
    const Sequence sequence = Create();
    const auto bytes = Bytes(rows * 32, 0);
    EXPECT_TRUE(sequence.Append(0, bytes, bytes, Layout::kNHD).ok());
    return sequence;
  }

  // Loses the first reply, after the operations took effect.
  void LoseTheFirstReply() {
    server_.on_manage = [this, answer = server_.on_manage](auto* context, const auto& request,
                                                           auto* response) {
      const grpc::Status status = answer(context, request, response);
      return ++calls_ == 1 ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "lost") : status;
    };
  }

  int calls_ = 0;
};

TEST_F(ManageSequencesTest, EveryOperationOfTheContractIsSentAndAnswered) {
  std::set<int> sent;
  server_.on_manage = [&, answer = server_.on_manage](auto* context, const auto& request,
                                                      auto* response) {
    for (const auto& operation : request.operations()) sent.insert(operation.operation_case());
    return answer(context, request, response);
  };
  const Sequence a = CreateWithRows(5), b = CreateWithRows(3);
  SequenceOptions made = SmallShape(2);
  made.pin = true;
  ForkOptions part;
  part.length = 2;
  part.pin = true;
  const auto results = client_->ManageSequences(
      {Op::Create(made), Op::Fork(a, part), Op::Truncate(a, 4, 5), Op::Info(a), Op::Delete(b)});
  ASSERT_TRUE(results.ok()) << results.status();
  ASSERT_THAT(*results, SizeIs(5));
  for (const SequenceResult& result : *results) ASSERT_TRUE(result.sequence.ok());
  const auto* kinds = v1::SequenceOperation::descriptor()->oneof_decl(0);
  EXPECT_THAT(sent, SizeIs(kinds->field_count())) << "the client lacks an operation";

  const Sequence& created = *(*results)[0].sequence;
  EXPECT_EQ(created.Info()->num_layers(), 2u);
  EXPECT_TRUE(created.options().pin);
  EXPECT_EQ(created.options().device_id, (*results)[0].info.device_id());
  const Sequence& fork = *(*results)[1].sequence;
  EXPECT_NE(fork.id(), a.id());
  EXPECT_THAT(fork.Info()->layer_lengths(), ElementsAre(2));
  EXPECT_TRUE(fork.options().pin);
  EXPECT_EQ(fork.options().head_dim, 8u);
  EXPECT_EQ((*results)[2].sequence->id(), a.id());
  EXPECT_THAT((*results)[2].info.layer_lengths(), ElementsAre(4));
  EXPECT_THAT((*results)[3].info.layer_lengths(), ElementsAre(4));
  EXPECT_EQ((*results)[4].sequence->id(), b.id());
  EXPECT_TRUE(absl::IsNotFound(b.Info().status()));
  EXPECT_THAT(*client_->ManageSequences({}), IsEmpty());
}

TEST_F(ManageSequencesTest, AFailureIsThatOfItsOperation) {
  const Sequence a = CreateWithRows(5), b = Create();
  ASSERT_TRUE(b.Delete().ok());
  const auto results =
      client_->ManageSequences({Op::Fork(b), Op::Truncate(a, 1, 9), Op::Delete(a)});
  ASSERT_TRUE(results.ok()) << results.status();
  EXPECT_TRUE(absl::IsNotFound((*results)[0].sequence.status()));
  EXPECT_TRUE(absl::IsFailedPrecondition((*results)[1].sequence.status()));
  EXPECT_THAT((*results)[1].info.layer_lengths(), IsEmpty());
  EXPECT_TRUE((*results)[2].sequence.ok());
}

TEST_F(ManageSequencesTest, IsSentAgainUnlessItMakesASequence) {
  const Sequence a = Create();
  server_.on_manage = [this](auto*, const auto&, auto*) {
    ++calls_;
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "draining");
  };
  const auto calls = [&](const std::vector<Op>& operations) {
    calls_ = 0;
    EXPECT_TRUE(absl::IsUnavailable(client_->ManageSequences(operations).status()));
    return calls_;
  };
  EXPECT_EQ(calls({Op::Truncate(a, 0), Op::Info(a), Op::Delete(a)}), 3);
  EXPECT_EQ(calls({Op::Info(a), Op::Fork(a)}), 1);
  EXPECT_EQ(calls({Op::Create(SmallShape()), Op::Info(a)}), 1);
}

TEST_F(ManageSequencesTest, OperationsWhoseFirstReplyWasLostSucceed) {
  const Sequence a = CreateWithRows(5), b = CreateWithRows(5), c = CreateWithRows(5);
  ASSERT_TRUE(c.Truncate(4).ok());
  LoseTheFirstReply();
  const auto results =
      client_->ManageSequences({Op::Truncate(a, 3, 5), Op::Delete(b), Op::Truncate(c, 3, 5)});
  ASSERT_TRUE(results.ok()) << results.status();
  EXPECT_EQ(calls_, 2);
  EXPECT_TRUE((*results)[0].sequence.ok());
  EXPECT_THAT((*results)[0].info.layer_lengths(), ElementsAre(3));
  EXPECT_TRUE((*results)[1].sequence.ok());
  EXPECT_TRUE(absl::IsFailedPrecondition((*results)[2].sequence.status()));
}

TEST_F(ManageSequencesTest, HasOneAffinity) {
  SequenceOptions options = SmallShape();
  options.affinity = "session 7";
  const Sequence a = Create(options);
  const auto affinities = [&](const CallOptions& call, const Op& first) {
    const auto results = client_->ManageSequences({first, Op::Create(SmallShape())}, call);
    std::vector<std::string> seen = {server_.metadata("x-flashcore-sequence").back()};
    for (const SequenceResult& result : *results) {
      seen.push_back(result.sequence->options().affinity);
    }
    return seen;
  };
  EXPECT_THAT(affinities({}, Op::Fork(a)), AllOf(SizeIs(3), Each("session 7")));
  EXPECT_THAT(affinities({{}, "given"}, Op::Create(options)), AllOf(SizeIs(3), Each("given")));
  const auto random = affinities({}, Op::Create(SmallShape()));
  EXPECT_THAT(random, AllOf(SizeIs(3), Each(random[0])));
  EXPECT_THAT(random[0], SizeIs(16));
}

TEST_F(ManageSequencesTest, RepliesThatDoNotFitAreErrors) {
  const Sequence a = Create();
  v1::ManageSequencesResponse reply;
  server_.on_manage = [&](auto*, const auto&, v1::ManageSequencesResponse* response) {
    *response = reply;
    return grpc::Status::OK;
  };
  EXPECT_TRUE(absl::IsInternal(client_->ManageSequences({Op::Fork(a)}).status()));
  reply.add_results()->mutable_sequence()->set_sequence_id("short");
  const auto results = client_->ManageSequences({Op::Fork(a)});
  ASSERT_TRUE(results.ok()) << results.status();
  EXPECT_TRUE(absl::IsInternal((*results)[0].sequence.status()));
}

TEST_F(ManageSequencesTest, ADeletedSequenceIsNotLoadedAgain) {
  Sequence a = Create();
  int reloads = 0;
  a.OnLost([&](const SequenceOptions&) -> absl::StatusOr<Sequence> {
    ++reloads;
    return absl::UnknownError("");
  });
  ASSERT_TRUE(client_->ManageSequences({Op::Delete(a)}).ok());
  EXPECT_TRUE(absl::IsNotFound(a.Info().status()));
  EXPECT_EQ(reloads, 0);
}

}  // namespace
}  // namespace flashcore
