// LaunchBuilder, through the SequenceStore: launches, one at a time and several at once.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/kv/operation.h"
#include "tests/base/has_info.h"
#include "tests/kv/sequence_store_fixture.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using testing::HasInfo;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::OperationPtr;
using testing::Rows;
using testing::SequenceStoreTest;
using ::testing::SizeIs;

using absl::StatusCode;

using SequenceLaunchTest = SequenceStoreTest;

TEST_F(SequenceLaunchTest, AppendsAcrossPages) {
  const SequenceId id = Load(Rows(60, 'a'));
  EXPECT_EQ(Pages(), 1u);
  const OperationPtr operation = Lease({{id, Rows(100, 'b')}});
  const auto launch = Begin({operation.get()});
  EXPECT_THAT(operation->sequence_lengths, ElementsAre(160));
  EXPECT_THAT(launch->appends, SizeIs(3));
  EXPECT_EQ(Text(*launch), Rows(60, 'a') + Rows(100, 'b'));
  EXPECT_EQ(Length(id), 60u) << "visible before the launch has ended";
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Length(id), 160u);
  EXPECT_EQ(Pages(), 3u);
  EXPECT_EQ(Text(id), Rows(60, 'a') + Rows(100, 'b'));
}

TEST_F(SequenceLaunchTest, ReadsThePagesThatReplaceTruncatedOnes) {
  const SequenceId id = Load(Rows(200, 'a'));
  EXPECT_EQ(Text(id), Rows(200, 'a'));
  ASSERT_TRUE(store_->Truncate(id, 70, {}, {"alice", {}}).ok());
  const SequenceId other = Load(Rows(128, 'b'));  // takes the pages that are free now
  EXPECT_EQ(Text(id), Rows(70, 'a'));
  ASSERT_EQ(Append(id, Rows(100, 'c')), absl::OkStatus());
  EXPECT_EQ(Text(id), Rows(70, 'a') + Rows(100, 'c'));
  EXPECT_EQ(Text(other), Rows(128, 'b'));
  // A fork writes to a copy of the page that both share.
  const SequenceId fork = Fork(id);
  EXPECT_EQ(Text(fork), Text(id));
  ASSERT_EQ(Append(fork, "fork"), absl::OkStatus());
  ASSERT_EQ(Append(id, "own"), absl::OkStatus());
  EXPECT_EQ(Text(fork), Rows(70, 'a') + Rows(100, 'c') + "fork");
  EXPECT_EQ(Text(id), Rows(70, 'a') + Rows(100, 'c') + "own");
}

TEST_F(SequenceLaunchTest, OperationsOfOneLaunchSeeWhatThoseBeforeThemAppend) {
  const SequenceId id = Create();
  const OperationPtr first = Lease({{id, Rows(10, 'a')}});
  const OperationPtr reader = Lease({{id, ""}});
  const OperationPtr second = Lease({{id, Rows(60, 'b')}});
  const auto launch = Begin({first.get(), reader.get(), second.get()});
  EXPECT_EQ(Text(*launch, 0), Rows(10, 'a'));
  EXPECT_EQ(Text(*launch, 1), Rows(10, 'a'));
  EXPECT_EQ(Text(*launch, 2), Rows(10, 'a') + Rows(60, 'b'));
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Text(id), Rows(10, 'a') + Rows(60, 'b'));
  EXPECT_EQ(Pages(), 2u);
}

TEST_F(SequenceLaunchTest, AFailedLaunchLeavesEverythingAsItWas) {
  const SequenceId parent = Load("parent");
  const SequenceId child = Fork(parent);
  const SequenceId lone = Load("lone");
  const OperationPtr copies = Lease({{child, "x"}});
  const OperationPtr in_place = Lease({{lone, Rows(70, 'x')}});
  const auto launch = Begin({copies.get(), in_place.get()});
  EXPECT_EQ(Pages(), 4u);
  store_->EndLaunch(*launch, false);
  EXPECT_EQ(Pages(), 2u);
  EXPECT_EQ(Text(parent), "parent");
  EXPECT_EQ(Text(child), "parent");
  EXPECT_EQ(Text(lone), "lone");
  ASSERT_EQ(Append(child, "!"), absl::OkStatus());
  ASSERT_EQ(Append(lone, "!"), absl::OkStatus());
  EXPECT_EQ(Text(child), "parent!");
  EXPECT_EQ(Text(lone), "lone!");
}

TEST_F(SequenceLaunchTest, ExpectedLengthCountsWhatTheLaunchAppendsBefore) {
  const SequenceId id = Load("abc");
  EXPECT_EQ(Append({{id, "d", 3}}), absl::OkStatus());
  const absl::Status retried = Append({{id, "d", 3}});
  EXPECT_EQ(retried.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(retried.message()),
              HasSubstr("expected_length: 3; the sequence has 4 rows in layer 0"));
  EXPECT_THAT(retried,
              HasInfo("LENGTH_MISMATCH", {{"sequence_id", absl::BytesToHexString(id.ToBytes())},
                                          {"expected", "3"},
                                          {"actual", "4"},
                                          {"span", "0"}}));

  const OperationPtr first = Lease({{id, "ef", 4}});
  const OperationPtr second = Lease({{id, "g", 6}});
  const OperationPtr late = Lease({{id, "h", 6}});
  const auto launch = Begin({first.get(), second.get(), late.get()});
  EXPECT_THAT(launch->operations, ElementsAre(first.get(), second.get()));
  ASSERT_THAT(launch->refused, SizeIs(1));
  EXPECT_EQ(launch->refused[0].second.code(), StatusCode::kFailedPrecondition);
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Text(id), "abcdefg");
}

TEST_F(SequenceLaunchTest, WhatDoesNotFitIsLeftAloneWithAllBehindIt) {
  const SequenceId parent = Load("parent");
  const SequenceId child = Fork(parent);
  const OperationPtr first = Lease({{parent, ""}});
  const OperationPtr refused = Lease({{parent, "x", 5}});
  const OperationPtr copies = Lease({{child, Rows(70, 'x')}});
  const OperationPtr behind = Lease({{parent, ""}});
  std::vector<uint64_t> lengths;  // of those that were asked for
  const auto fits = [&](AttendOperation* operation) {
    lengths.push_back(operation->sequence_lengths.front());
    return operation != copies.get();
  };
  Launch launch;
  EXPECT_EQ(
      store_->BeginLaunch({first.get(), refused.get(), copies.get(), behind.get()}, fits, &launch),
      2u);
  EXPECT_THAT(lengths, ElementsAre(6, 76));
  EXPECT_THAT(launch.operations, ElementsAre(first.get()));
  EXPECT_THAT(launch.refused, SizeIs(1));
  EXPECT_THAT(launch.copies, IsEmpty());
  EXPECT_THAT(launch.appends, IsEmpty());
  EXPECT_THAT(launch.resident, SizeIs(1));
  EXPECT_EQ(Pages(), 1u);
  store_->EndLaunch(launch, true);
  EXPECT_EQ(Text(child), "parent");

  const auto later = Begin({copies.get(), behind.get()});
  store_->EndLaunch(*later, true);
  EXPECT_EQ(Text(child), "parent" + Rows(70, 'x'));
  EXPECT_EQ(Text(parent), "parent");
}

TEST_F(SequenceLaunchTest, WorkIsCheckedAgainWhenAppendsHaveLanded) {
  SequenceStore::Options options;
  options.max_request_flop = 4.0 * kHeadDim * 100;  // one query row over 100 rows
  Open(options);
  const SequenceId id = Load(Rows(60, 'a'));
  const OperationPtr load = Lease({{id, Rows(40, 'b')}});
  const OperationPtr late = Lease({{id, "c"}});
  const OperationPtr reader = Lease({{id, ""}});
  const auto launch = Begin({load.get(), late.get(), reader.get()});
  EXPECT_THAT(launch->operations, ElementsAre(load.get(), reader.get()));
  ASSERT_THAT(launch->refused, SizeIs(1));
  EXPECT_EQ(launch->refused[0].second.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(launch->refused[0].second.message()), HasSubstr("at most 12800"));
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Text(id), Rows(60, 'a') + Rows(40, 'b'));
}

TEST_F(SequenceLaunchTest, ALeaseChecksTheWorkWithTheRowsThatAreThere) {
  SequenceStore::Options options;
  options.max_request_flop = 4.0 * kHeadDim * 100;
  Open(options);
  const SequenceId id = Load(Rows(100, 'a'));
  EXPECT_EQ(store_->Lease(MakeOperation({{id, ""}}).get()), absl::OkStatus());
  EXPECT_EQ(store_->Lease(MakeOperation({{id, "b"}}).get()).code(), StatusCode::kInvalidArgument);
}

TEST_F(SequenceLaunchTest, ARequestThatFillsTheArenaAppendsNothingAtAll) {
  Open({}, /*pages=*/6);
  const SequenceId a = Load("a");
  const SequenceId child = Fork(a);
  const SequenceId b = Load("b");
  const OperationPtr before = Lease({{a, Rows(100, 'x')}});  // a copy, and a new page
  const OperationPtr too_much = Lease({{a, "y"}, {child, "y"}, {b, Rows(200, 'y')}});
  const OperationPtr after = Lease({{b, Rows(64, 'z')}});
  const auto launch = Begin({before.get(), too_much.get(), after.get()});
  ASSERT_THAT(launch->refused, SizeIs(1));
  EXPECT_EQ(launch->refused[0].first, too_much.get());
  EXPECT_EQ(launch->refused[0].second.code(), StatusCode::kResourceExhausted);
  // It needs a copy of the page of `child`, and three more pages of `b`.
  EXPECT_EQ(launch->refused[0].second.message(),
            "K/V memory is full: the request needs 32768 bytes more; 32768 of 49152 bytes are in "
            "use, and 16384 are free for pages of 8192");
  EXPECT_THAT(launch->refused[0].second, HasInfo("KV_FULL", {{"needed_bytes", "32768"},
                                                             {"free_bytes", "16384"},
                                                             {"used_bytes", "32768"}}));
  EXPECT_THAT(launch->copies, SizeIs(1));
  EXPECT_THAT(launch->appends, SizeIs(4));  // each of the other two on two pages
  EXPECT_THAT(launch->resident, SizeIs(2));
  EXPECT_EQ(Pages(), 5u);
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Text(a), "a" + Rows(100, 'x'));
  EXPECT_EQ(Text(child), "a");
  EXPECT_EQ(Text(b), "b" + Rows(64, 'z'));

  // Alone it leaves no trace either.
  EXPECT_EQ(Append({{child, "y"}, {b, Rows(200, 'y')}}).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(Pages(), 5u);
  ASSERT_EQ(Append({{child, "!"}, {b, "!"}}), absl::OkStatus());
  EXPECT_EQ(Text(child), "a!");
  EXPECT_EQ(Text(b), "b" + Rows(64, 'z') + "!");
}

TEST_F(SequenceLaunchTest, AClientOverItsShareOfKvLearnsWhatItHadBefore) {
  SequenceStore::Options options;
  options.client_kv_bytes = 4 * kPageBytes;
  Open(options);
  const SequenceId a = Load("a");
  const SequenceId b = Load("b");
  const absl::Status refused = Append({{a, Rows(64, 'x')}, {b, Rows(128, 'x')}});
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.message(),
            "client quota: the sequences of this client hold 16384 of 32768 bytes of K/V, and the "
            "request needs 24576 more");
  EXPECT_THAT(refused, HasInfo("QUOTA_EXCEEDED", {{"limit", "client_kv_bytes"},
                                                  {"needed", "24576"},
                                                  {"used", "16384"},
                                                  {"allowed", "32768"}}));
  // A fork of another client's pages; it has none of the last one of `a` any more.
  ASSERT_EQ(Append({{a, Rows(128, 'x')}}), absl::OkStatus());
  const SequenceId full = store_->Fork(a, {}, {}, {"bob", {}})->id;
  ASSERT_EQ(Append({{full, "y"}}, 0, "bob"), absl::OkStatus());
  ASSERT_EQ(store_->Fork(b, {}, {}, {"bob", {}}).status(), absl::OkStatus());
  EXPECT_THAT(store_->Fork(a, {}, {}, {"bob", {}}).status(),
              HasInfo("QUOTA_EXCEEDED", {{"limit", "client_kv_bytes"},
                                         {"needed", "8192"},
                                         {"used", "32768"},
                                         {"allowed", "32768"}}));
}

TEST_F(SequenceLaunchTest, MoreThanThereIsRoomForIsTooLarge) {
  Open({}, /*pages=*/2);
  const SequenceId id = Create();
  EXPECT_THAT(Append(id, Rows(129, 'a')),
              HasInfo("TOO_LARGE", {{"needed_bytes", "24576"}, {"limit_bytes", "16384"}}));
  SequenceStore::Options options;
  options.client_kv_bytes = 2 * kPageBytes;
  Open(options);
  EXPECT_THAT(Append(Create(), Rows(129, 'a')),
              HasInfo("TOO_LARGE", {{"needed_bytes", "24576"}, {"limit_bytes", "16384"}}));
}

TEST_F(SequenceLaunchTest, EverySequenceThatIsGoneIsNamed) {
  const SequenceId a = Load("a");
  const SequenceId b = Load("b");
  const SequenceId c = Load("c");
  const OperationPtr queued = Lease({{a, "x"}, {b, "x"}, {c, "x"}});
  ASSERT_EQ(store_->Delete(a, {"alice", {}}), absl::OkStatus());
  ASSERT_EQ(store_->Delete(c, {"alice", {}}), absl::OkStatus());
  const auto launch = Begin({queued.get()});
  ASSERT_THAT(launch->refused, SizeIs(1));
  const absl::Status& refused = launch->refused[0].second;
  EXPECT_EQ(refused.code(), StatusCode::kNotFound);
  EXPECT_EQ(
      refused.message(),
      "spans[0].sequence_id, spans[2].sequence_id: the sequence was deleted while the request "
      "was queued");
  const std::string ids =
      absl::BytesToHexString(a.ToBytes()) + "," + absl::BytesToHexString(c.ToBytes());
  EXPECT_THAT(refused,
              HasInfo("SEQUENCE_LOST", {{"sequence_ids", ids}, {"spans", "0,2"}, {"lost", "2"}}));
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Text(b), "b");
}

TEST_F(SequenceLaunchTest, TheFirstAppendToASharedPartlyFilledPageCopiesIt) {
  const SequenceId parent = Load(Rows(64, 'a') + "tail");
  const SequenceId child = Fork(parent);
  const OperationPtr first = Lease({{child, "+child"}});
  const auto launch = Begin({first.get()});
  EXPECT_THAT(launch->copies, SizeIs(1));
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Pages(), 3u);

  const OperationPtr second = Lease({{child, "+again"}});
  const auto next = Begin({second.get()});
  EXPECT_THAT(next->copies, IsEmpty()) << "the page is the child's own";
  store_->EndLaunch(*next, true);
  ASSERT_EQ(Append(parent, "+parent"), absl::OkStatus());
  EXPECT_EQ(Pages(), 3u);
  EXPECT_EQ(Text(child), Rows(64, 'a') + "tail+child+again");
  EXPECT_EQ(Text(parent), Rows(64, 'a') + "tail+parent");
}

TEST_F(SequenceLaunchTest, AFullSharedPageIsNotCopied) {
  const SequenceId child = Fork(Load(Rows(64, 'a')));
  const OperationPtr operation = Lease({{child, "b"}});
  const auto launch = Begin({operation.get()});
  EXPECT_THAT(launch->copies, IsEmpty());
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Pages(), 2u);
}

TEST_F(SequenceLaunchTest, ForksThatAppendInOneLaunchEachGetACopy) {
  const SequenceId parent = Load("p");
  const SequenceId a = Fork(parent);
  const SequenceId b = Fork(parent);
  ASSERT_EQ(store_->Delete(parent, {"alice", {}}), absl::OkStatus());
  ASSERT_EQ(Append({{a, "+a"}, {b, "+b"}}), absl::OkStatus());
  EXPECT_EQ(Text(a), "p+a");
  EXPECT_EQ(Text(b), "p+b");
  EXPECT_EQ(Pages(), 2u);
}

TEST_F(SequenceLaunchTest, AForkDuringALaunchHasWhatWasThereBefore) {
  const SequenceId parent = Load("abc");
  const OperationPtr operation = Lease({{parent, "def"}});
  const auto launch = Begin({operation.get()});
  const SequenceId child = Fork(parent);
  ASSERT_EQ(Append(child, "xyz"), absl::OkStatus());
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Text(parent), "abcdef");
  EXPECT_EQ(Text(child), "abcxyz");
}

TEST_F(SequenceLaunchTest, TruncateDiscardsWhatARunningLaunchAppends) {
  const SequenceId id = Load(Rows(64, 'a') + "bcd");
  const OperationPtr operation = Lease({{id, Rows(100, 'x')}});
  const auto launch = Begin({operation.get()});
  EXPECT_EQ(Pages(), 3u);
  ASSERT_TRUE(store_->Truncate(id, 65, {}, {"alice", {}}).ok());
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Length(id), 65u);
  EXPECT_EQ(Pages(), 2u);
  ASSERT_EQ(Append(id, "y"), absl::OkStatus());
  EXPECT_EQ(Text(id), Rows(64, 'a') + "by");
}

TEST_F(SequenceLaunchTest, TruncateDiscardsTheCopyOfASharedPageToo) {
  const SequenceId parent = Load("abc");
  const SequenceId child = Fork(parent);
  const OperationPtr operation = Lease({{child, "xyz"}});
  const auto launch = Begin({operation.get()});
  ASSERT_TRUE(store_->Truncate(child, 3, {}, {"alice", {}})
                  .ok());  // keeps all that it has, but nothing pending
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Text(child), "abc");
  EXPECT_EQ(Pages(), 1u);
}

TEST_F(SequenceLaunchTest, PagesThatALaunchUsesStayUntilItHasEnded) {
  const SequenceId truncated = Load(Rows(200, 'a'));
  const SequenceId deleted = Load(Rows(64, 'b'));
  const OperationPtr read = Lease({{truncated, ""}});
  const OperationPtr append = Lease({{deleted, "c"}});
  const auto launch = Begin({read.get(), append.get()});
  ASSERT_TRUE(store_->Truncate(truncated, 1, {}, {"alice", {}}).ok());
  ASSERT_EQ(store_->Delete(deleted, {"alice", {}}), absl::OkStatus());
  EXPECT_FALSE(Exists(deleted));
  EXPECT_EQ(Pages(), 6u);
  Load(Rows(640, 'z'));  // takes other pages
  EXPECT_EQ(Text(*launch, 0), Rows(200, 'a'));
  EXPECT_EQ(Text(*launch, 1), Rows(64, 'b') + "c");
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Pages(), 11u);
  EXPECT_EQ(Text(truncated), "a");
}

TEST_F(SequenceLaunchTest, ASequenceThatIsDeletedWhileItsRequestWaitsIsNotFound) {
  const SequenceId deleted = Load("deleted");
  const SequenceId kept = Load("kept");
  const OperationPtr both = Lease({{kept, "+x"}, {deleted, "+x"}});
  const OperationPtr other = Lease({{kept, "+y"}});
  ASSERT_EQ(store_->Delete(deleted, {"alice", {}}), absl::OkStatus());
  const auto launch = Begin({both.get(), other.get()});
  ASSERT_THAT(launch->refused, SizeIs(1));
  EXPECT_EQ(launch->refused[0].first, both.get());
  EXPECT_EQ(launch->refused[0].second.code(), StatusCode::kNotFound);
  EXPECT_THAT(std::string(launch->refused[0].second.message()), HasSubstr("spans[1].sequence_id"));
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Text(kept), "kept+y");
  EXPECT_EQ(Pages(), 1u);
}

TEST_F(SequenceLaunchTest, WhatIsDroppedIsFreeWhenEveryLaunchOfThatTimeHasEnded) {
  const SequenceId kept = Load("kept");
  for (const bool older_ends_first : {true, false}) {
    const SequenceId dropped = Load("dropped");
    const OperationPtr read_kept = Lease({{kept, ""}});
    const OperationPtr read_dropped = Lease({{dropped, ""}});
    const auto older = Begin({read_kept.get()});
    const auto younger = Begin({read_dropped.get()});
    EXPECT_LT(older->id, younger->id);
    ASSERT_EQ(store_->Delete(dropped, {"alice", {}}), absl::OkStatus());
    const auto later = Begin({read_kept.get()});
    store_->EndLaunch(older_ends_first ? *older : *younger, true);
    EXPECT_EQ(Pages(), 2u);
    store_->EndLaunch(older_ends_first ? *younger : *older, true);
    EXPECT_EQ(Pages(), 1u) << "waits for a launch that began afterwards";
    store_->EndLaunch(*later, true);
  }
}

TEST_F(SequenceLaunchTest, ALaunchOfInlineKvIsNoneOfTheStores) {
  AttendOperation operation;
  operation.request = testing::MakeRequest();
  ASSERT_EQ(store_->Lease(&operation), absl::OkStatus());
  Launch launch;
  AttendOperation* const operations[] = {&operation};
  store_->BeginLaunch(
      operations, [](AttendOperation*) { return true; }, &launch);
  EXPECT_THAT(launch.operations, ElementsAre(&operation));
  EXPECT_EQ(launch.id, 0u);
  store_->EndLaunch(launch, true);
}

}  // namespace
}  // namespace flashcore::server
