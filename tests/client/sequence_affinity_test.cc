// Sequences behind a proxy: the affinity that every call carries, and reloading what was lost.
#include <atomic>
#include <thread>
#include <vector>

#include "flashcore/error_info.h"
#include "flashcore/sequence.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/error_status.h"
#include "tests/client/sequence_fixture.h"

namespace flashcore {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::SizeIs;

constexpr char kAffinityKey[] = "x-flashcore-sequence";
const std::vector<std::byte> kRow = Bytes(32, 0);

// One query row over a sequence and, if `expected_length` is given, one row to append.
absl::Status Attend(const Sequence& sequence, std::optional<uint64_t> expected_length,
                    AttendResult* result = nullptr) {
  std::vector<std::byte> output(kRow.size());
  AttendRequest request;
  request.spans = {{1, 0, {}, expected_length}};
  request.num_heads = 2;
  request.query = kRow;
  request.output = absl::MakeSpan(output);
  if (expected_length.has_value()) {
    request.spans[0].kv_rows = 1;
    request.key = request.value = kRow;
  }
  return sequence.Attend(request, result);
}

class AffinityTest : public SequenceTest {
 protected:
  std::vector<std::string> affinities() const { return server_.metadata(kAffinityKey); }

  // Makes a sequence with as many rows in layer 0.
  absl::StatusOr<Sequence> Make(const SequenceOptions& options, size_t rows) {
    absl::StatusOr<Sequence> made = client_->CreateSequence(options);
    if (!made.ok() || rows == 0) return made;
    const auto bytes = Bytes(rows * 32, 0);
    const auto info = made->Append(0, bytes, bytes, Layout::kNHD, 0);
    return info.ok() ? made : info.status();
  }

  // Makes it anew when it is lost, counting.
  Sequence CreateReloaded(size_t rows) {
    Sequence sequence = Make(SmallShape(), rows).value();
    sequence.OnLost([this, rows](const SequenceOptions& options) {
      ++reloads_;
      return Make(options, rows);
    });
    return sequence;
  }

  std::atomic<int> reloads_{0};
};

TEST_F(AffinityTest, EveryOperationCarriesTheAffinityOfItsSequence) {
  SequenceOptions options = SmallShape();
  options.affinity = "session 7";
  const Sequence sequence = Create(options);
  ASSERT_TRUE(sequence.Append(0, kRow, kRow, Layout::kNHD).ok());
  ASSERT_TRUE(Attend(sequence, 1).ok());
  ASSERT_TRUE(sequence.Truncate(1).ok());
  ASSERT_TRUE(sequence.Info().ok());
  const Sequence fork = sequence.Fork().value();
  ASSERT_TRUE(fork.Info().ok());
  ASSERT_TRUE(client_->OpenSequence(fork.id(), {{}, "session 7"})->Delete().ok());
  ASSERT_TRUE(sequence.Delete().ok());
  EXPECT_THAT(affinities(), AllOf(SizeIs(10), Each("session 7")));
}

TEST_F(AffinityTest, IsRandomUnlessGiven) {
  const Sequence one = Create(), two = Create();
  EXPECT_THAT(one.options().affinity, SizeIs(16));
  EXPECT_NE(one.options().affinity, two.options().affinity);
  EXPECT_THAT(affinities(), ElementsAre(one.options().affinity, two.options().affinity));
}

TEST_F(AffinityTest, OfRequestsAndStreamsIsAsGiven) {
  const Sequence sequence = Create();
  std::vector<std::byte> output(kRow.size());
  AttendRequest request;
  request.request_id = "a";
  request.spans = {{1, 1}};
  request.num_heads = request.num_kv_heads = 2;
  request.head_dim = 8;
  request.query = request.key = request.value = kRow;
  request.output = absl::MakeSpan(output);
  const CallOptions call = {{}, "\xc3\xa9\n"};  // not as it is in a header
  ASSERT_TRUE(client_->Attend(request, nullptr, call).ok());
  ASSERT_TRUE(client_->Attend(request, nullptr).ok());
  absl::Notification done;
  client_->AttendAsync(request, [&](auto, auto) { done.Notify(); }, {{}, "async"});
  done.WaitForNotification();
  StreamOptions stream;
  stream.affinity = "stream";
  ASSERT_TRUE(client_->OpenStream(stream)->Finish().ok());
  EXPECT_THAT(affinities(),
              ElementsAre(sequence.options().affinity, R"(\xc3\xa9\n)", "", "async", "stream"));
}

TEST_F(AffinityTest, EveryOperationReloadsWhatWasLost) {
  const Sequence sequence = CreateReloaded(5);
  const Sequence copy = sequence;
  const std::string affinity = sequence.options().affinity;
  const auto lose = [&] {
    sequences_.Clear();
    return sequence.id();
  };

  std::string lost = lose();
  AttendResult result;
  EXPECT_EQ(Attend(sequence, 5, &result), absl::OkStatus());
  EXPECT_THAT(result.sequence_lengths, ElementsAre(6));
  EXPECT_NE(sequence.id(), lost);
  EXPECT_EQ(copy.id(), sequence.id());

  lost = lose();
  EXPECT_THAT(sequence.Append(0, kRow, kRow, Layout::kNHD, 5)->layer_lengths(), ElementsAre(6));
  lost = lose();
  EXPECT_THAT(sequence.Truncate(2)->layer_lengths(), ElementsAre(2));
  lost = lose();
  EXPECT_THAT(sequence.Fork(3)->Info()->layer_lengths(), ElementsAre(3));
  lost = lose();
  EXPECT_THAT(copy.Info()->layer_lengths(), ElementsAre(5));
  EXPECT_NE(sequence.id(), lost);
  EXPECT_EQ(reloads_, 5);
  EXPECT_THAT(affinities(), Each(affinity));
}

TEST_F(AffinityTest, TheRepeatGoesWhereTheReloadedSequenceIs) {
  SequenceOptions options = SmallShape();
  options.affinity = "old";
  Sequence sequence = Create(options);
  sequence.OnLost([&](SequenceOptions lost) {
    lost.affinity = "new";
    return client_->CreateSequence(lost);
  });
  sequences_.Clear();
  EXPECT_EQ(Attend(sequence, 0), absl::OkStatus());
  EXPECT_TRUE(sequence.Info().ok());
  EXPECT_THAT(affinities(), ElementsAre("old", "old", "new", "new", "new"))
      << "Create, the lost Attend, Create, Attend, Get";
}

TEST_F(AffinityTest, ADeletedSequenceStaysDeleted) {
  const Sequence sequence = CreateReloaded(1);
  EXPECT_EQ(sequence.Delete(), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(sequence.Info().status()));
  EXPECT_TRUE(absl::IsNotFound(sequence.Delete()));
  EXPECT_EQ(reloads_, 0);
}

TEST_F(AffinityTest, ReloadsMayBeOnAnotherServerAndAnyDevice) {
  FakeSequences other_sequences;
  FakeServer other;
  other_sequences.Install(&other);
  const auto other_client = *Client::Create(other.target(), Options());
  SequenceOptions options = SmallShape();
  options.device_id = "fake:7";
  Sequence sequence = Create(options);
  sequence.OnLost([&](const SequenceOptions& lost) {
    EXPECT_EQ(lost.device_id, "");
    EXPECT_EQ(lost.head_dim, 8u);
    return other_client->CreateSequence(lost);
  });
  sequences_.Clear();
  EXPECT_TRUE(Attend(sequence, 0).ok());
  EXPECT_EQ(sequence.options().device_id, "fake:0");
  EXPECT_EQ(other_sequences.size(), 1u);
  EXPECT_EQ(other.metadata(kAffinityKey), std::vector<std::string>(2, sequence.options().affinity));
}

TEST_F(AffinityTest, AFailedReloadIsTheAnswerAndTheNextOperationTriesAgain) {
  Sequence sequence = Create();
  absl::Status answer = absl::ResourceExhaustedError("no room");
  sequence.OnLost([&](const SequenceOptions& options) -> absl::StatusOr<Sequence> {
    ++reloads_;
    if (!answer.ok()) return answer;
    return client_->CreateSequence(options);
  });
  sequences_.Clear();
  EXPECT_EQ(Attend(sequence, 0), answer);
  EXPECT_EQ(sequence.Info().status(), answer);
  answer = absl::OkStatus();
  EXPECT_EQ(Attend(sequence, 0), absl::OkStatus());
  EXPECT_EQ(reloads_, 3);
}

TEST_F(AffinityTest, OnlyALostSequenceIsReloaded) {
  const Sequence sequence = CreateReloaded(1);
  server_.on_attend = [](auto*, const auto&, auto*) {
    return ToGrpc(StatusWithInfo(absl::StatusCode::kNotFound, "REGION_LOST", "key", "value"));
  };
  EXPECT_EQ(GetErrorInfo(Attend(sequence, 0)).reason, "REGION_LOST");
  EXPECT_EQ(reloads_, 0);
  server_.on_attend = [](auto*, const auto&, auto*) {
    return ToGrpc(StatusWithInfo(absl::StatusCode::kNotFound, "SEQUENCE_LOST", "key", "value"));
  };
  EXPECT_EQ(GetErrorInfo(Attend(sequence, 0)).reason, "SEQUENCE_LOST");
  EXPECT_EQ(reloads_, 1);
}

TEST_F(AffinityTest, WhatIsLostAgainAtOnceIsNotReloadedAgain) {
  Sequence sequence = Create();
  sequence.OnLost([&](const SequenceOptions& options) {
    ++reloads_;
    const auto made = client_->CreateSequence(options);
    sequences_.Clear();
    return made;
  });
  sequences_.Clear();
  EXPECT_TRUE(absl::IsNotFound(Attend(sequence, 0)));
  EXPECT_EQ(reloads_, 1);
}

TEST_F(AffinityTest, ThreadsThatLoseOneSequenceReloadItOnce) {
  const Sequence sequence = CreateReloaded(5);
  sequences_.Clear();
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, copy = sequence] {
      for (int step = 0; step < 20; ++step) failures += !Attend(copy, std::nullopt).ok();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(reloads_, 1);
  EXPECT_EQ(sequences_.size(), 1u);
}

}  // namespace
}  // namespace flashcore
