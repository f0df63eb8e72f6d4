// Clients that are refused or cut off for replies that they do not read.
#include "server/transport/rpc/unsent_replies.h"

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/base/fake_clock.h"
#include "tests/base/has_info.h"
#include "tests/transport/rpc_setup.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;

constexpr size_t kShare = 1000;
constexpr size_t kAll = 4 * kShare;
constexpr std::chrono::seconds kTimeout(20);
constexpr std::chrono::milliseconds kSoon(250);

class UnsentRepliesTest : public ::testing::Test {
 protected:
  UnsentRepliesTest() { replies_.Start({{kAll, kShare}, kTimeout}, &clock_); }

  // One that its client does not read.
  struct Unread {
    Unread(UnsentReplies* all, const std::string& client, size_t bytes,
           const StagingUse& staging = {})
        : reply(all, [this](CutOff why, bool again) { (again ? cut_off_again : cut_off) = why; }) {
      reply.Ready(client, bytes, staging);
    }

    std::atomic<CutOff> cut_off{CutOff::kNo};
    std::atomic<CutOff> cut_off_again{CutOff::kNo};
    UnsentReply reply;
  };
  std::unique_ptr<Unread> Ready(const std::string& client, size_t bytes) {
    return std::make_unique<Unread>(&replies_, client, bytes);
  }
  static bool WaitForCutOff(const Unread& unread, CutOff why) {
    return testing::WaitUntil([&] { return unread.cut_off == why; });
  }

  testing::FakeClock clock_;
  UnsentReplies replies_;
};

TEST_F(UnsentRepliesTest, AClientIsRefusedForItsOwnAlone) {
  const auto first = Ready("a", 500);
  EXPECT_EQ(replies_.Check("a"), absl::OkStatus());
  auto second = Ready("a", 251);
  const absl::Status refused = replies_.Check("a");
  EXPECT_THAT(refused, testing::HasInfo("REPLIES_FULL"));
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("unread replies of this client take 751 bytes; the limit is 750"));
  EXPECT_EQ(replies_.Check("b"), absl::OkStatus());
  EXPECT_EQ(second->reply.Sent(), CutOff::kNo);
  EXPECT_EQ(replies_.Check("a"), absl::OkStatus());
  EXPECT_EQ(replies_.bytes(), 500);
}

TEST_F(UnsentRepliesTest, NobodyIsRefusedForWhatOthersOwe) {
  std::deque<std::unique_ptr<Unread>> unread;
  for (const char* client : {"a", "b", "c", "d"}) unread.push_back(Ready(client, kShare));
  EXPECT_EQ(replies_.bytes(), kAll);
  EXPECT_EQ(replies_.Check("honest"), absl::OkStatus());
}

TEST_F(UnsentRepliesTest, BeyondItsShareAClientLosesItsOldest) {
  const auto honest = Ready("honest", 10);
  const auto oldest = Ready("a", 600);
  const auto second = Ready("a", 300);
  const auto newest = Ready("a", 200);
  EXPECT_EQ(replies_.bytes("a"), 1100);  // it may be reading
  clock_.Advance(kSoon);
  EXPECT_TRUE(WaitForCutOff(*oldest, CutOff::kShare));
  EXPECT_EQ(oldest->reply.Sent(), CutOff::kShare);
  EXPECT_EQ(second->reply.Sent(), CutOff::kNo);
  EXPECT_EQ(newest->reply.Sent(), CutOff::kNo);
  EXPECT_EQ(honest->reply.Sent(), CutOff::kNo);
  EXPECT_EQ(replies_.bytes(), 0);
}

TEST_F(UnsentRepliesTest, RefusalsAreBounded) {
  std::deque<std::unique_ptr<Unread>> unread;
  for (int i = 0; i < 1000; ++i) {
    unread.push_back(Ready("a", 70));  // whether it is refused or not
    EXPECT_LE(replies_.bytes(), kAll);
  }
  clock_.Advance(kSoon);
  EXPECT_TRUE(testing::WaitUntil([&] { return replies_.bytes("a") == 980; }));
  for (int i = 0; i < 1000 - 14; ++i) EXPECT_TRUE(WaitForCutOff(*unread[i], CutOff::kShare));
  for (int i = 1000 - 14; i < 1000; ++i) EXPECT_EQ(unread[i]->reply.Sent(), CutOff::kNo);
}

// None of them has more than its share.
TEST_F(UnsentRepliesTest, TheClientWithTheMostMakesRoomForOthers) {
  const auto largest = Ready("largest", 200), next = Ready("largest", 800);
  std::deque<std::unique_ptr<Unread>> others;
  for (const char* client : {"b", "c", "d"}) others.push_back(Ready(client, 990));
  const auto honest = Ready("honest", 100);
  EXPECT_TRUE(WaitForCutOff(*largest, CutOff::kShare));
  EXPECT_EQ(replies_.bytes("largest"), 800);
  EXPECT_EQ(replies_.bytes(), kAll - 200 + 70);
  EXPECT_EQ(honest->reply.Sent(), CutOff::kNo);
  EXPECT_EQ(next->reply.Sent(), CutOff::kNo);
  for (const auto& other : others) EXPECT_EQ(other->reply.Sent(), CutOff::kNo);
}

TEST_F(UnsentRepliesTest, AReplyLargerThanTheShareIsSentAlone) {
  const auto small = Ready("a", 10);
  const auto large = Ready("a", 50 * kShare);
  clock_.Advance(kSoon);
  EXPECT_TRUE(WaitForCutOff(*small, CutOff::kShare));
  EXPECT_THAT(replies_.Check("a"), testing::HasInfo("REPLIES_FULL"));
  EXPECT_EQ(large->reply.Sent(), CutOff::kNo);
  EXPECT_EQ(replies_.bytes(), 0);
}

TEST_F(UnsentRepliesTest, EachReplyHasItsTime) {
  std::deque<std::unique_ptr<Unread>> unread;
  for (int i = 0; i < 100; ++i) unread.push_back(Ready("client " + std::to_string(i), 10));
  clock_.Advance(kTimeout / 2);
  const auto later = Ready("client 0", 10);
  clock_.Advance(kTimeout / 2);
  for (const auto& one : unread) EXPECT_TRUE(WaitForCutOff(*one, CutOff::kTimeout));
  EXPECT_EQ(replies_.bytes(), 10);
  EXPECT_EQ(later->reply.Sent(), CutOff::kNo);
}

TEST_F(UnsentRepliesTest, WhatDoesNotEndIsCutOffAgain) {
  const auto ends = Ready("a", 10), stays = Ready("a", 10);
  clock_.Advance(kTimeout);
  for (const auto* one : {ends.get(), stays.get()}) {
    EXPECT_TRUE(WaitForCutOff(*one, CutOff::kTimeout));
  }
  EXPECT_EQ(ends->reply.Sent(), CutOff::kTimeout);
  EXPECT_EQ(stays->cut_off_again, CutOff::kNo);
  clock_.Advance(std::chrono::seconds(1));
  EXPECT_TRUE(testing::WaitUntil([&] { return stays->cut_off_again == CutOff::kTimeout; }));
  EXPECT_EQ(ends->cut_off_again, CutOff::kNo);
}

TEST_F(UnsentRepliesTest, ADrainCutsAllOff) {
  std::deque<std::unique_ptr<Unread>> unread;
  for (int i = 0; i < 100; ++i) unread.push_back(Ready("client " + std::to_string(i), 10));
  replies_.CutOffAll();
  for (const auto& one : unread) EXPECT_TRUE(WaitForCutOff(*one, CutOff::kDrain));
  EXPECT_EQ(replies_.bytes(), 0);
}

// The staging memory of four clients' replies is all there is.
class UnsentStagingTest : public UnsentRepliesTest {
 protected:
  static constexpr size_t kBuffer = 4096;

  UnsentStagingTest() {
    replies_in_pool_.Start({{kAll, kShare}, kTimeout}, &clock_, {&unused_pool_, &pool_});
    for (const char* client : {"a", "b", "c", "d"}) {
      for (int i = 0; i < (client[0] == 'b' ? 5 : 4); ++i) unread_.push_back(AddReply(client));
    }
  }
  // A result, until it was sent.
  struct Reply {
    StagingClaim claim;
    std::unique_ptr<Unread> unread;
  };
  std::unique_ptr<Reply> AddReply(const char* client) {
    auto reply = std::make_unique<Reply>();
    reply->claim.client = client;
    reply->claim.result_bytes = kBuffer;
    EXPECT_EQ(pool_.Acquire(&reply->claim), absl::OkStatus());
    reply->unread =
        std::make_unique<Unread>(&replies_in_pool_, client, 10, reply->claim.results.use());
    return reply;
  }
  // Those that were cut off, in order of unread_.
  std::string CutOffs() const {
    std::string cut_off;
    for (const auto& reply : unread_) {
      if (reply->unread->cut_off == CutOff::kStaging) cut_off += std::string(reply->claim.client);
    }
    return cut_off;
  }

  // Before the pool calls a claim of a test that failed.
  void TearDown() override { pool_.LeaveQueue(&honest_); }

  StagingPool unused_pool_{kBuffer, StagingPool::HeapAllocator()};  // of another device
  StagingPool pool_{17 * kBuffer, StagingPool::HeapAllocator(), 1 << 20};
  UnsentReplies replies_in_pool_;
  std::vector<std::unique_ptr<Reply>> unread_;
  std::atomic<bool> granted_ = false;
  StagingClaim honest_;
};

TEST_F(UnsentStagingTest, TheClientWithTheMostGivesStagingMemoryBack) {
  honest_.client = "honest";
  honest_.result_bytes = 2 * kBuffer;
  honest_.granted = [this] { granted_ = true; };
  ASSERT_EQ(pool_.JoinQueue(&honest_), absl::OkStatus());
  clock_.Advance(kSoon / 2);
  EXPECT_EQ(pool_.Debt(), nullptr);  // they may be reading
  clock_.Advance(kSoon / 2);
  ASSERT_TRUE(testing::WaitUntil([&] { return CutOffs().size() == 2; }));
  EXPECT_EQ(CutOffs(), "ab");  // b has the most, then a and b have the same
  EXPECT_FALSE(granted_);
  for (const auto& reply : unread_) {
    if (reply->unread->cut_off != CutOff::kStaging) continue;
    EXPECT_EQ(reply->unread->reply.Sent(), CutOff::kStaging);
    reply->claim.results.Reset();
  }
  EXPECT_TRUE(granted_);
  EXPECT_TRUE(pool_.LeaveQueue(&honest_));
}

TEST_F(UnsentStagingTest, NobodyGivesBackWhileThereIsRoom) {
  clock_.Advance(kSoon);
  clock_.Advance(kSoon);
  for (const auto& reply : unread_) {
    EXPECT_EQ(reply->unread->reply.Sent(), CutOff::kNo);
    reply->claim.results.Reset();
  }
  EXPECT_EQ(pool_.used_bytes(), 0u);
}

}  // namespace
}  // namespace flashcore::server
