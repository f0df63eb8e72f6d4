#include "server/memory/staging_pool.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/base/has_info.h"
#include "tests/base/test_seed.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using testing::HasInfo;
using ::testing::HasSubstr;

absl::StatusOr<StagingBuffer> Acquire(StagingPool* pool, size_t bytes) {
  StagingClaim claim;
  claim.input_bytes = bytes;
  if (absl::Status status = pool->Acquire(&claim); !status.ok()) return status;
  return std::move(claim.inputs);
}

TEST(StagingPoolTest, SizeClassesWasteAtMostAQuarter) {
  EXPECT_EQ(StagingPool::SizeClass(1), 4096u);
  EXPECT_EQ(StagingPool::SizeClass(4096), 4096u);
  EXPECT_EQ(StagingPool::SizeClass(4097), 5120u);
  EXPECT_EQ(StagingPool::SizeClass(8192), 8192u);
  for (size_t bytes = 5000; bytes < 100'000'000; bytes = bytes * 9 / 8 + 3) {
    const size_t capacity = StagingPool::SizeClass(bytes);
    EXPECT_GE(capacity, bytes);
    EXPECT_LE(capacity, bytes + bytes / 4 + 1) << bytes;
    EXPECT_EQ(capacity % StagingPool::kAlignment, 0u) << bytes;
    EXPECT_EQ(StagingPool::SizeClass(capacity), capacity) << bytes;
  }
}

TEST(StagingPoolTest, KeepsReturnedBuffersForReuse) {
  StagingPool pool(1 << 20, StagingPool::HeapAllocator());
  std::byte* first = nullptr;
  {
    StagingBuffer buffer = *Acquire(&pool, 5000);
    first = buffer.data();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % StagingPool::kAlignment, 0u);
    EXPECT_EQ(buffer.capacity(), 5120u);
    EXPECT_EQ(pool.used_bytes(), 5120u);
    EXPECT_EQ(pool.free_bytes(), 0u);
  }
  EXPECT_EQ(pool.used_bytes(), 0u);
  EXPECT_EQ(pool.free_bytes(), 5120u);
  StagingBuffer again = *Acquire(&pool, 4500);
  EXPECT_EQ(again.data(), first);
}

TEST(StagingPoolTest, RefusesBeyondTheLimitAndSaysSo) {
  StagingPool pool(16384, StagingPool::HeapAllocator());
  StagingBuffer held = *Acquire(&pool, 8192);
  const auto refused = Acquire(&pool, 8193);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("needs 8193 bytes; 8192 of 16384 are in use"));
  EXPECT_THAT(refused.status(),
              HasInfo("STAGING_FULL", {{"needed_bytes", "8193"}, {"limit_bytes", "16384"}}));
  EXPECT_TRUE(Acquire(&pool, 8192).ok());
  EXPECT_THAT(Acquire(&pool, 16385).status(),
              HasInfo("TOO_LARGE", {{"needed_bytes", "16385"}, {"limit_bytes", "16384"}}));
  EXPECT_EQ(Acquire(&pool, SIZE_MAX).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(StagingPoolTest, GivesUpKeptBuffersOfOtherSizesBeforeRefusing) {
  StagingPool pool(16384, StagingPool::HeapAllocator());
  { StagingBuffer a = *Acquire(&pool, 4096), b = *Acquire(&pool, 8192); }
  EXPECT_EQ(pool.free_bytes(), 12288u);
  StagingBuffer big = *Acquire(&pool, 16384);
  EXPECT_EQ(pool.used_bytes(), 16384u);
  EXPECT_EQ(pool.free_bytes(), 0u);
}

TEST(StagingPoolTest, ReportsAnAllocatorThatFails) {
  StagingPool pool(1 << 20, {[](size_t) -> void* { return nullptr; }, [](void*) {}});
  EXPECT_EQ(Acquire(&pool, 1).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool.used_bytes(), 0u);
}

TEST(StagingPoolTest, HalfOfAClaimThatTheAllocatorLacksIsKeptForTheNext) {
  StagingPool::Allocator heap = StagingPool::HeapAllocator();
  int left = 1, allocated = 0;
  {
    StagingPool pool(1 << 20, {[&](size_t bytes) -> void* {
                                 if (left == 0) return nullptr;
                                 --left;
                                 ++allocated;
                                 return heap.allocate(bytes);
                               },
                               [&](void* memory) {
                                 --allocated;
                                 heap.free(memory);
                               }});
    StagingClaim claim;
    claim.input_bytes = 4096;
    claim.result_bytes = 8192;
    EXPECT_EQ(pool.Acquire(&claim).code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(claim.inputs.data(), nullptr);
    EXPECT_EQ(pool.used_bytes(), 0u);
    EXPECT_EQ(pool.free_bytes(), 4096u);
    EXPECT_TRUE(Acquire(&pool, 4096).ok()) << "it needs none from the allocator";
    left = 1;
    EXPECT_EQ(pool.Acquire(&claim), absl::OkStatus());
  }
  EXPECT_EQ(allocated, 0);
}

TEST(StagingPoolTest, NothingCostsNothing) {
  StagingPool pool(4096, StagingPool::HeapAllocator());
  const StagingBuffer buffer = *Acquire(&pool, 0);
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(pool.used_bytes(), 0u);
}

TEST(StagingPoolTest, ManyThreadsStayWithinTheLimit) {
  const size_t limit = 1 << 20;
  const unsigned seed = TestSeed();
  std::atomic<size_t> allocated{0};
  {
    std::vector<std::thread> threads;
    StagingPool::Allocator heap = StagingPool::HeapAllocator();
    StagingPool pool(limit, {[&](size_t bytes) {
                               ++allocated;
                               return heap.allocate(bytes);
                             },
                             [&](void* memory) {
                               --allocated;
                               heap.free(memory);
                             }});
    for (unsigned thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&pool, limit, seed = seed + thread] {
        std::mt19937 random(seed);
        std::vector<StagingBuffer> held;
        for (int i = 0; i < 5000; ++i) {
          auto buffer = Acquire(&pool, random() % 100'000);
          if (buffer.ok()) {
            if (buffer->data() != nullptr) std::memset(buffer->data(), i, 64);
            held.push_back(*std::move(buffer));
          }
          if (held.size() > random() % 8) held.erase(held.begin());
          EXPECT_LE(pool.used_bytes(), limit);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(pool.used_bytes(), 0u);
    EXPECT_LE(pool.free_bytes(), limit);
  }
  EXPECT_EQ(allocated, 0u);
}

// Claims that wait for a pool of 16 KiB, all of it in use.
class StagingQueueTest : public ::testing::Test {
 protected:
  struct Waiter : StagingClaim {
    Waiter(StagingQueueTest* test, int name, size_t for_inputs, size_t for_results = 0) {
      input_bytes = for_inputs;
      result_bytes = for_results;
      granted = [test, name] { test->granted_.push_back(name); };
    }
  };

  std::vector<int> granted_;  // names, in order
  StagingPool pool_{16384, StagingPool::HeapAllocator(), /*max_waiting_bytes=*/20480};
  StagingBuffer first_ = *Acquire(&pool_, 8192);
  StagingBuffer second_ = *Acquire(&pool_, 8192);
};

TEST_F(StagingQueueTest, NoClaimOvertakesALargerOne) {
  Waiter large(this, 1, 12288), small(this, 2, 4096), last(this, 3, 4096);
  for (Waiter* waiter : {&large, &small, &last})
    ASSERT_EQ(pool_.JoinQueue(waiter), absl::OkStatus());
  EXPECT_EQ(pool_.waiting(), 3u);
  first_.Reset();  // enough for the small ones
  EXPECT_THAT(granted_, ElementsAre());
  EXPECT_EQ(Acquire(&pool_, 1).status().code(), absl::StatusCode::kResourceExhausted);
  second_.Reset();
  EXPECT_THAT(granted_, ElementsAre(1, 2));
  EXPECT_EQ(large.inputs.capacity(), 12288u);
  large.inputs.Reset();
  EXPECT_THAT(granted_, ElementsAre(1, 2, 3));
  EXPECT_EQ(pool_.waiting(), 0u);
  for (Waiter* waiter : {&large, &small, &last}) EXPECT_TRUE(pool_.LeaveQueue(waiter));
}

TEST_F(StagingQueueTest, AClaimGetsBothBuffersOrNone) {
  Waiter waiter(this, 1, 8192, 8192);
  ASSERT_EQ(pool_.JoinQueue(&waiter), absl::OkStatus());
  first_.Reset();
  EXPECT_EQ(waiter.inputs.data(), nullptr);
  EXPECT_EQ(pool_.used_bytes(), 8192u);
  second_.Reset();
  EXPECT_NE(waiter.inputs.data(), nullptr);
  EXPECT_NE(waiter.results.data(), nullptr);
  EXPECT_TRUE(pool_.LeaveQueue(&waiter));
}

TEST_F(StagingQueueTest, WhenOneLeavesThoseBehindItGo) {
  Waiter large(this, 1, 16384), small(this, 2, 4096);
  ASSERT_EQ(pool_.JoinQueue(&large), absl::OkStatus());
  ASSERT_EQ(pool_.JoinQueue(&small), absl::OkStatus());
  first_.Reset();
  EXPECT_THAT(granted_, ElementsAre());
  EXPECT_FALSE(pool_.LeaveQueue(&large));
  EXPECT_THAT(granted_, ElementsAre(2));
  second_.Reset();
  EXPECT_THAT(granted_, ElementsAre(2));
  EXPECT_TRUE(pool_.LeaveQueue(&small));
}

TEST_F(StagingQueueTest, MemoryThatCameBackBeforeTheWaitIsGrantedAtOnce) {
  Waiter waiter(this, 1, 8192);
  EXPECT_EQ(pool_.Acquire(&waiter).code(), absl::StatusCode::kResourceExhausted);
  first_.Reset();
  EXPECT_EQ(pool_.JoinQueue(&waiter), absl::OkStatus());
  EXPECT_THAT(granted_, ElementsAre(1));
  EXPECT_TRUE(pool_.LeaveQueue(&waiter));
}

TEST_F(StagingQueueTest, WhatIsLargerThanThePoolDoesNotWait) {
  Waiter waiter(this, 1, 12288, 8192), huge(this, 2, SIZE_MAX);
  EXPECT_THAT(std::string(pool_.JoinQueue(&waiter).message()),
              HasSubstr("needs 20480 bytes; 16384 of 16384 are in use"));
  EXPECT_EQ(pool_.JoinQueue(&huge).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool_.waiting(), 0u);
}

TEST_F(StagingQueueTest, TheQueueIsBounded) {
  Waiter first(this, 1, 16384), second(this, 2, 4096), third(this, 3, 1);
  ASSERT_EQ(pool_.JoinQueue(&first), absl::OkStatus());
  ASSERT_EQ(pool_.JoinQueue(&second), absl::OkStatus());
  EXPECT_THAT(std::string(pool_.JoinQueue(&third).message()), HasSubstr("2 requests wait"));
  EXPECT_FALSE(pool_.LeaveQueue(&second));
  EXPECT_EQ(pool_.JoinQueue(&third), absl::OkStatus());
  EXPECT_FALSE(pool_.LeaveQueue(&third));
  EXPECT_FALSE(pool_.LeaveQueue(&first));
}

// A pool of 32 KiB, of which a client may hold 16.
class StagingShareTest : public ::testing::Test {
 protected:
  struct Waiter : StagingClaim {
    Waiter(StagingShareTest* test, const char* name, size_t bytes) {
      client = name;
      input_bytes = bytes;
      granted = [test, name] { test->granted_.push_back(name); };
    }
  };

  std::vector<std::string> granted_;  // clients, in order
  StagingPool pool_{32768, StagingPool::HeapAllocator(), 1 << 20, /*client_bytes=*/16384};
};

TEST_F(StagingShareTest, AClientThatHoldsItsShareIsRefusedAloneAndToldSo) {
  Waiter first(this, "greedy", 12288), second(this, "greedy", 8192), other(this, "other", 16384);
  EXPECT_EQ(pool_.Acquire(&first), absl::OkStatus());
  const absl::Status refused = pool_.Acquire(&second);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("12288 of the 16384 of --client_staging_bytes are in use"));
  EXPECT_THAT(refused, HasInfo("QUOTA_EXCEEDED", {{"limit", "client_staging_bytes"},
                                                  {"needed", "8192"},
                                                  {"used", "12288"},
                                                  {"allowed", "16384"}}));
  EXPECT_EQ(pool_.Acquire(&other), absl::OkStatus());
  first.inputs.Reset();
  EXPECT_EQ(pool_.Acquire(&second), absl::OkStatus());
}

TEST_F(StagingShareTest, MoreThanAShareNeverFits) {
  Waiter large(this, "a", 20480), huge(this, "a", SIZE_MAX), together(this, "a", 12288);
  together.result_bytes = 8192;
  for (Waiter* waiter : {&large, &huge, &together}) {
    EXPECT_EQ(pool_.Acquire(waiter).code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(pool_.JoinQueue(waiter).code(), absl::StatusCode::kResourceExhausted);
  }
  EXPECT_THAT(pool_.JoinQueue(&together),
              HasInfo("TOO_LARGE", {{"needed_bytes", "20480"}, {"limit_bytes", "16384"}}));
  EXPECT_EQ(pool_.waiting(), 0u);
}

TEST_F(StagingShareTest, WhoWaitsForItsShareHoldsUpNobodyElse) {
  Waiter held(this, "greedy", 16384), waits(this, "greedy", 4096), other(this, "other", 8192);
  ASSERT_EQ(pool_.Acquire(&held), absl::OkStatus());
  ASSERT_EQ(pool_.JoinQueue(&waits), absl::OkStatus());
  EXPECT_THAT(granted_, ElementsAre());
  EXPECT_EQ(pool_.Acquire(&other), absl::OkStatus());  // at once
  Waiter third(this, "third", 16384), fourth(this, "fourth", 4096);
  ASSERT_EQ(pool_.JoinQueue(&third), absl::OkStatus());  // for memory
  EXPECT_EQ(pool_.Acquire(&fourth).code(), absl::StatusCode::kResourceExhausted)
      << "it would overtake";
  other.inputs.Reset();
  EXPECT_THAT(granted_, ElementsAre("third"));
  third.inputs.Reset();
  held.inputs.Reset();
  EXPECT_THAT(granted_, ElementsAre("third", "greedy"));
  EXPECT_EQ(pool_.waiting(), 0u);
}

// The pool has 1 MiB.
TEST_F(StagingShareTest, WhoHasTheMostInAFullQueueMakesRoom) {
  Waiter held(this, "greedy", 16384);
  ASSERT_EQ(pool_.Acquire(&held), absl::OkStatus());
  std::vector<std::unique_ptr<Waiter>> waiters;
  for (int i = 0; i < 64; ++i) {
    waiters.push_back(std::make_unique<Waiter>(this, "greedy", 16384));
    EXPECT_EQ(pool_.JoinQueue(waiters.back().get()), absl::OkStatus());
  }
  Waiter more(this, "greedy", 1);
  EXPECT_THAT(std::string(pool_.JoinQueue(&more).message()),
              HasSubstr("requests of 1048576 bytes wait"));
  EXPECT_THAT(granted_, ElementsAre());
  Waiter rest(this, "rest", 12288), honest(this, "honest", 8192);
  ASSERT_EQ(pool_.Acquire(&rest), absl::OkStatus());
  EXPECT_EQ(pool_.JoinQueue(&honest), absl::OkStatus());
  EXPECT_THAT(granted_, ElementsAre("greedy"));
  EXPECT_THAT(std::string(waiters.back()->refusal.message()), HasSubstr("--client_staging_bytes"));
  EXPECT_EQ(pool_.waiting(), 64u);
  EXPECT_TRUE(pool_.LeaveQueue(waiters.back().get()));
  waiters.pop_back();
  for (auto& waiter : waiters) EXPECT_FALSE(pool_.LeaveQueue(waiter.get()));
  EXPECT_FALSE(pool_.LeaveQueue(&honest));
}

TEST_F(StagingShareTest, EndWaitsRefusesAllThatWaitAndWillWait) {
  Waiter held(this, "a", 16384), waits(this, "a", 4096), late(this, "a", 4096);
  ASSERT_EQ(pool_.Acquire(&held), absl::OkStatus());
  ASSERT_EQ(pool_.JoinQueue(&waits), absl::OkStatus());
  pool_.EndWaits(absl::UnavailableError("over"));
  EXPECT_THAT(granted_, ElementsAre("a"));  // which ends the wait
  EXPECT_TRUE(pool_.LeaveQueue(&waits));
  EXPECT_EQ(waits.refusal, absl::UnavailableError("over"));
  EXPECT_EQ(waits.inputs.data(), nullptr);
  EXPECT_EQ(pool_.JoinQueue(&late), absl::UnavailableError("over"));
}

// A pool of 32 KiB, full of results of 4 KiB.
class StagingDebtTest : public StagingShareTest {
 protected:
  struct Result : Waiter {
    Result(StagingDebtTest* test, const char* name) : Waiter(test, name, 4096), pool(&test->pool_) {
      EXPECT_EQ(pool->Acquire(this), absl::OkStatus());
      pool->AddUnread(4096);
    }
    void SetOverdue() { pool->AddOverdue(client, 4096, &overdue); }
    void GiveBack() {
      pool->RemoveUnread(4096, &overdue);
      inputs.Reset();
    }

    StagingPool* const pool;
    Shares::Item overdue;
  };
  StagingDebtTest() {
    pool_.SetOnDebt([this] { ++told_; });
    for (const char* client : {"a", "a", "a", "a", "b", "b", "b", "c"}) {
      results_.push_back(std::make_unique<Result>(this, client));
    }
  }
  ~StagingDebtTest() override {
    for (auto& result : results_) {
      if (result->inputs.data() != nullptr) result->GiveBack();
    }
  }
  void SetAllOverdue() {
    for (auto& result : results_) result->SetOverdue();
  }
  // Index in results_ of the debt; -1: none.
  int Debt() {
    const Shares::Item* const debt = pool_.Debt();
    for (size_t i = 0; i < results_.size(); ++i) {
      if (debt == &results_[i]->overdue) return static_cast<int>(i);
    }
    return -1;
  }

  std::vector<std::unique_ptr<Result>> results_;
  int told_ = 0;
};

TEST_F(StagingDebtTest, NobodyGivesBackBeforeItIsOverdueOrWithoutNeed) {
  Waiter honest(this, "honest", 8192);
  ASSERT_EQ(pool_.JoinQueue(&honest), absl::OkStatus());
  EXPECT_EQ(Debt(), -1);
  ASSERT_FALSE(pool_.LeaveQueue(&honest));
  SetAllOverdue();
  EXPECT_EQ(told_, 0);
  EXPECT_EQ(Debt(), -1);
}

TEST_F(StagingDebtTest, TheClientWithTheMostOverdueGivesBackItsOldestUntilTheClaimFits) {
  SetAllOverdue();
  Waiter honest(this, "honest", 8192);
  ASSERT_EQ(pool_.JoinQueue(&honest), absl::OkStatus());
  EXPECT_EQ(told_, 1);
  EXPECT_EQ(Debt(), 0);
  results_[0]->GiveBack();
  EXPECT_EQ(Debt(), 1);
  // Given back, but not released yet: that is enough.
  pool_.RemoveUnread(4096, &results_[1]->overdue);
  EXPECT_EQ(Debt(), -1);
  EXPECT_THAT(granted_, ElementsAre());
  results_[1]->inputs.Reset();
  EXPECT_THAT(granted_, ElementsAre("honest"));
}

TEST_F(StagingDebtTest, AClaimThatFindsItOverdueLaterTellsToo) {
  Waiter honest(this, "honest", 8192);
  ASSERT_EQ(pool_.JoinQueue(&honest), absl::OkStatus());
  EXPECT_EQ(told_, 0);
  SetAllOverdue();
  EXPECT_EQ(told_, 1);
  EXPECT_EQ(Debt(), 0);
  EXPECT_FALSE(pool_.LeaveQueue(&honest));
}

TEST_F(StagingDebtTest, AClaimThatDoesNotWaitTellsToo) {
  SetAllOverdue();
  Waiter honest(this, "honest", 4096);
  EXPECT_EQ(pool_.Acquire(&honest).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(told_, 1);
  EXPECT_EQ(Debt(), 0);
  results_[0]->GiveBack();
  EXPECT_EQ(Debt(), -1);
  EXPECT_EQ(pool_.Acquire(&honest), absl::OkStatus());
}

TEST_F(StagingDebtTest, NobodyGainsByAskingForMore) {
  SetAllOverdue();
  Waiter large(this, "honest", 16384), owes(this, "b", 4096);
  ASSERT_EQ(pool_.JoinQueue(&large), absl::OkStatus());
  ASSERT_EQ(pool_.JoinQueue(&owes), absl::OkStatus());  // b would have as much as a
  EXPECT_EQ(told_, 0);
  EXPECT_EQ(Debt(), -1);
  EXPECT_FALSE(pool_.LeaveQueue(&owes));
  EXPECT_FALSE(pool_.LeaveQueue(&large));
}

TEST_F(StagingDebtTest, AClaimForWhichNobodyGivesBackHoldsUpNobody) {
  SetAllOverdue();
  Waiter large(this, "large", 16384), small(this, "small", 4096), next(this, "next", 4096);
  ASSERT_EQ(pool_.JoinQueue(&large), absl::OkStatus());
  ASSERT_EQ(pool_.JoinQueue(&small), absl::OkStatus());
  results_[7]->GiveBack();
  EXPECT_THAT(granted_, ElementsAre("small"));
  results_[6]->GiveBack();
  EXPECT_EQ(pool_.Acquire(&next), absl::OkStatus());
  EXPECT_FALSE(pool_.LeaveQueue(&large));
}

TEST_F(StagingDebtTest, WhoOwesMoreThanAnotherWouldHoldWaitsBehindIt) {
  SetAllOverdue();
  Waiter more(this, "b", 4096), honest(this, "honest", 8192);
  ASSERT_EQ(pool_.JoinQueue(&more), absl::OkStatus());  // first
  ASSERT_EQ(pool_.JoinQueue(&honest), absl::OkStatus());
  results_[0]->GiveBack();
  results_[1]->GiveBack();
  EXPECT_THAT(granted_, ElementsAre("honest"));
  results_[2]->GiveBack();
  EXPECT_THAT(granted_, ElementsAre("honest", "b"));
}

// Goes off when the test calls `*callback`.
class FakeAlarm final : public Alarm {
 public:
  FakeAlarm(std::function<void()>* callback, bool* cancelled)
      : callback_(callback), cancelled_(cancelled) {}
  void Set(Nanoseconds /*delay*/, std::function<void()> callback) override {
    *callback_ = std::move(callback);
  }
  void Cancel() override { *cancelled_ = true; }

 private:
  std::function<void()>* const callback_;
  bool* const cancelled_;
};

class TimedStagingWaitTest : public StagingQueueTest {
 protected:
  void Start() {
    claim_.input_bytes = 8192;
    wait_.Start(&pool_, &claim_, std::chrono::seconds(1),
                std::make_unique<FakeAlarm>(&go_off_, &cancelled_),
                [this](absl::Status status) { results_.push_back(status.code()); });
  }

  std::function<void()> go_off_;
  bool cancelled_ = false;                 // the alarm
  std::vector<absl::StatusCode> results_;  // of the wait
  StagingClaim claim_;
  StagingWait wait_;
};

TEST_F(TimedStagingWaitTest, EndsOnTheAlarmsThreadWhenTheMemoryIsThere) {
  Start();
  EXPECT_FALSE(cancelled_);
  first_.Reset();
  EXPECT_TRUE(cancelled_);
  EXPECT_THAT(results_, ElementsAre());
  go_off_();
  EXPECT_THAT(results_, ElementsAre(absl::StatusCode::kOk));
  EXPECT_EQ(claim_.inputs.capacity(), 8192u);
}

TEST_F(TimedStagingWaitTest, EndsWhenTheTimeIsOver) {
  Start();
  go_off_();
  EXPECT_THAT(results_, ElementsAre(absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(pool_.waiting(), 0u);
}

TEST_F(TimedStagingWaitTest, EndsWhenItIsCancelled) {
  Start();
  wait_.Cancel();
  EXPECT_TRUE(cancelled_);
  go_off_();
  EXPECT_THAT(results_, ElementsAre(absl::StatusCode::kCancelled));
  EXPECT_EQ(pool_.waiting(), 0u);
}

TEST_F(TimedStagingWaitTest, EndsWhenItWasCancelledBeforeItBegan) {
  wait_.Cancel();
  Start();
  EXPECT_TRUE(cancelled_);
  EXPECT_EQ(pool_.waiting(), 0u);
  go_off_();
  EXPECT_THAT(results_, ElementsAre(absl::StatusCode::kCancelled));
  EXPECT_EQ(claim_.inputs.data(), nullptr);
}

TEST_F(TimedStagingWaitTest, EndsWhenTheClaimIsRefused) {
  claim_.result_bytes = 16384;  // can never fit beside the inputs
  Start();
  EXPECT_TRUE(cancelled_);
  go_off_();
  EXPECT_THAT(results_, ElementsAre(absl::StatusCode::kResourceExhausted));
}

TEST(StagingPoolTest, NobodyWaitsForMemoryThatTheAllocatorLacks) {
  StagingPool pool(1 << 20, {[](size_t) -> void* { return nullptr; }, [](void*) {}}, 1 << 20);
  StagingClaim claim;
  claim.input_bytes = 1;
  EXPECT_EQ(pool.JoinQueue(&claim).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool.waiting(), 0u);
}

TEST(StagingPoolTest, ManyThreadsWaitAndAllAreServedOrLeave) {
  StagingPool pool(64 << 10, StagingPool::HeapAllocator(), 1 << 20);
  std::atomic<int> served{0};
  std::vector<std::thread> threads;
  const unsigned seed = TestSeed();
  for (unsigned thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&pool, &served, seed = seed + thread] {
      std::mt19937 random(seed);
      for (int i = 0; i < 500; ++i) {
        StagingClaim claim;
        std::promise<void> granted;
        claim.input_bytes = 1 + random() % 40'000;
        claim.result_bytes = random() % 20'000;
        claim.granted = [&granted] { granted.set_value(); };
        ASSERT_EQ(pool.JoinQueue(&claim), absl::OkStatus());
        const bool impatient = random() % 4 == 0;
        if (!impatient) granted.get_future().wait();
        if (!pool.LeaveQueue(&claim)) continue;
        std::memset(claim.inputs.data(), i, 64);
        ++served;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(served, 4 * 500 / 2);
  EXPECT_EQ(pool.used_bytes(), 0u);
  EXPECT_EQ(pool.waiting(), 0u);
}

}  // namespace
}  // namespace flashcore::server
