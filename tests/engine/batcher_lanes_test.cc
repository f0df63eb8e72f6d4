// The threads that use a Batcher: waiting, waking, closing, and random traffic.
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/kv/operation.h"
#include "tests/base/test_seed.h"
#include "tests/engine/batcher_fixture.h"

namespace flashcore::server {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// The clock stands still, so a spinning lane spins until it is woken.
class BatcherLanesTest : public BatcherTest, public ::testing::WithParamInterface<milliseconds> {
 protected:
  static Batcher::Options Spinning(Batcher::Options options) {
    options.idle_spin = GetParam();
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(IdleSpin, BatcherLanesTest,
                         ::testing::Values(milliseconds(0), milliseconds(1)),
                         [](const ::testing::TestParamInfo<milliseconds>& spin) {
                           return spin.param.count() > 0 ? "spinning" : "sleeping";
                         });

TEST_P(BatcherLanesTest, WakeMakesOneTakeReturnWithNothing) {
  Batcher batcher(Spinning({}), &clock_);
  Batch batch;
  std::thread lane([&] { EXPECT_TRUE(batcher.Take(&batch)); });
  batcher.Wake();
  lane.join();
  EXPECT_THAT(batch.operations, IsEmpty());
  EXPECT_THAT(batch.dropped, IsEmpty());
  AttendOperation* a = Add(&batcher, "x");
  ASSERT_TRUE(batcher.Take(&batch));  // that was the only one
  EXPECT_THAT(batch.operations, ElementsAre(a));
}

TEST_F(BatcherTest, WakesThatNobodyNoticedCountAsOne) {
  Batcher batcher({}, &clock_);
  batcher.Wake();
  batcher.Wake();
  AttendOperation* a = Add(&batcher, "x");
  Batch batch;
  ASSERT_TRUE(batcher.Take(&batch));
  EXPECT_THAT(batch.operations, IsEmpty());
  ASSERT_TRUE(batcher.Take(&batch));
  EXPECT_THAT(batch.operations, ElementsAre(a));
}

TEST_F(BatcherTest, CloseRunsOutTheQueue) {
  Batcher batcher({10, 1, 100, milliseconds(5)}, &clock_);
  AttendOperation* a = Add(&batcher, "x");
  AttendOperation* b = Add(&batcher, "x");
  batcher.Close();
  AttendOperation* displaced = nullptr;
  EXPECT_EQ(batcher.Enqueue(Make("x"), &displaced).code(), absl::StatusCode::kUnavailable);
  Batch batch;
  ASSERT_TRUE(batcher.Take(&batch));
  EXPECT_THAT(batch.operations, ElementsAre(a));
  ASSERT_TRUE(batcher.Take(&batch));
  EXPECT_THAT(batch.operations, ElementsAre(b));
  EXPECT_FALSE(batcher.Take(&batch));
}

TEST_F(BatcherTest, CloseDoesNotDelay) {
  Batcher batcher(kWithDelay, &clock_);
  AttendOperation* a = Add(&batcher, "x");
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
  batcher.Close();
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(a));
}

TEST_P(BatcherLanesTest, AfterCloseABlockedOperationIsWaitedFor) {
  OrderSlot slot;
  Batcher batcher(Spinning({}), &clock_);
  Add(&batcher, "x", {{&slot, kAppends}});
  const Batch first = Take(&batcher);
  AttendOperation* blocked = Add(&batcher, "x", {{&slot, kAppends}});
  batcher.Close();
  std::atomic<bool> released{false};
  std::atomic<int> taken{0};
  const auto drain = [&] {
    Batch batch;
    while (batcher.Take(&batch)) {
      EXPECT_TRUE(released);
      EXPECT_THAT(batch.operations, ElementsAre(blocked));
      ++taken;
      batcher.Release(batch);
    }
  };
  std::thread lane1(drain), lane2(drain);
  released = true;
  batcher.Release(first);
  lane1.join();
  lane2.join();
  EXPECT_EQ(taken, 1);
}

TEST_P(BatcherLanesTest, ReleaseWakesATakeThatWaits) {
  // Many rounds, so that the lane waits in some of them: the test cannot observe that.
  for (int round = 0; round < 20; ++round) {
    OrderSlot slot;
    Batcher batcher(Spinning({}), &clock_);
    Add(&batcher, "x", {{&slot, kAppends}});
    const Batch first = Take(&batcher);
    AttendOperation* blocked = Add(&batcher, "x", {{&slot, kAppends}});
    std::atomic<bool> started{false};
    std::thread lane([&] {
      started = true;
      Batch batch;
      EXPECT_TRUE(batcher.Take(&batch));
      EXPECT_THAT(batch.operations, ElementsAre(blocked));
    });
    while (!started) std::this_thread::yield();
    for (int i = 0; i < 20; ++i) std::this_thread::yield();
    batcher.Release(first);
    lane.join();
  }
}

// One Release unblocks two operations that need two batches: the lane that it wakes wakes the next.
TEST_P(BatcherLanesTest, ALaneThatLeavesWorkWakesAnother) {
  OrderSlot slot;
  Batcher batcher(Spinning({}), &clock_);
  Add(&batcher, "x", {{&slot, kAppends}});
  const Batch first = Take(&batcher);
  for (const uint32_t head_dim : {64, 128}) {
    AttendOperation* read = Make("x", 1, head_dim);
    read->order = {{&slot, kReads}};
    Add(&batcher, read);
  }
  std::atomic<int> started{0}, taken{0};
  std::atomic<bool> seen{false};
  std::vector<std::thread> lanes;
  for (int i = 0; i < 2; ++i) {
    lanes.emplace_back([&] {
      Batch batch;
      ++started;
      EXPECT_TRUE(batcher.Take(&batch));
      ++taken;
      while (!seen) std::this_thread::yield();  // busy: the other lane must take the other batch
      batcher.Release(batch);
    });
  }
  while (started < 2) std::this_thread::yield();
  for (int i = 0; i < 100; ++i) std::this_thread::yield();  // so that both wait, most of the time
  batcher.Release(first);
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (taken < 2 && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
  EXPECT_EQ(taken, 2) << "a lane sleeps beside work";
  batcher.Close();  // wakes it
  seen = true;
  for (std::thread& lane : lanes) lane.join();
}

TEST_P(BatcherLanesTest, ManyLanesTakeEveryRequestOnce) {
  Batcher batcher(Spinning({100000, 3, 100}), &clock_);
  constexpr int kRequests = 3000;
  std::atomic<int> taken{0};
  std::vector<std::thread> lanes;
  for (int i = 0; i < 3; ++i) {
    lanes.emplace_back([&] {
      Batch batch;
      while (batcher.Take(&batch)) {
        taken += static_cast<int>(batch.operations.size());
        batcher.Release(batch);
      }
    });
  }
  for (int i = 0; i < kRequests; ++i) Add(&batcher, "x", 1, i % 2 == 0 ? 64 : 128);
  batcher.Close();
  for (std::thread& lane : lanes) lane.join();
  EXPECT_EQ(taken, kRequests);
}

// Records what runs on some slots. Expects that operations which must not overlap on a slot run in
// their order. Thread-safe.
class SlotChecker {
 public:
  // Calls `enqueue` and records its effect on the slots in one step. `enqueue` returns whether
  // `operation` is queued, and the operation that it displaced or null.
  void Arrive(AttendOperation* operation,
              const std::function<std::pair<bool, AttendOperation*>()>& enqueue) {
    MutexLock lock(&mutex_);
    const auto [queued, displaced] = enqueue();
    if (displaced != nullptr) states_[displaced] = {kNeverStarts, 0};
    if (!queued) return;
    states_[operation] = {operation->cancelled ? kNeverStarts : kWaiting, 0};
    for (const OrderedUse& use : operation->order) {
      arrived_[use.slot].push_back({operation, use.appends});
    }
  }

  void Start(const Batch& batch) {
    MutexLock lock(&mutex_);
    for (AttendOperation* operation : batch.operations) {
      EXPECT_EQ(states_.at(operation).phase, kWaiting);
      for (const OrderedUse& use : operation->order) CheckStart(use, operation, batch.serial);
      states_[operation] = {kRunning, batch.serial};
    }
  }

  // It goes back to the queue.
  void Stop(AttendOperation* operation) {
    MutexLock lock(&mutex_);
    states_[operation] = {kWaiting, 0};
  }

  void End(const Batch& batch) {
    MutexLock lock(&mutex_);
    for (AttendOperation* operation : batch.operations) states_[operation] = {kEnded, 0};
  }

 private:
  enum Phase { kWaiting, kRunning, kEnded, kNeverStarts };
  struct State {
    Phase phase;
    uint64_t batch;  // if it runs
  };
  struct Arrival {
    AttendOperation* operation;
    bool appends;
  };

  void CheckStart(const OrderedUse& use, AttendOperation* operation, uint64_t batch)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    bool before = true;
    for (const Arrival& other : arrived_[use.slot]) {
      if (other.operation == operation) before = false;
      const State& state = states_.at(other.operation);
      if (other.operation == operation || state.phase == kNeverStarts) continue;
      if (!use.appends && !other.appends) continue;
      const bool same_batch = state.phase == kRunning && state.batch == batch;
      EXPECT_TRUE(before ? state.phase == kEnded || same_batch : state.phase == kWaiting);
    }
  }

  Mutex mutex_;
  std::map<OrderSlot*, std::vector<Arrival>> arrived_ ABSL_GUARDED_BY(mutex_);
  std::map<AttendOperation*, State> states_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(BatcherTest, KeepsItsPromisesOnRandomTraffic) {
  std::mt19937 random(TestSeed());
  const auto below = [&random](int n) {
    return static_cast<int>(random() % static_cast<unsigned>(n));
  };
  constexpr int kRequests = 3000;
  std::vector<OrderSlot> slots(6);
  Batcher batcher({/*max_queue_requests=*/40, /*max_batch_requests=*/5, /*max_batch_tokens=*/12},
                  &clock_);
  SlotChecker checker;
  std::atomic<int> ended{0};
  std::map<AttendOperation*, std::atomic<int>> ends;  // has all keys before the lanes start
  for (int i = 0; i < kRequests; ++i) {
    AttendOperation* operation =
        Make(absl::StrCat("client ", below(5)), 1 + below(4), below(3) == 0 ? 128 : 64);
    for (OrderSlot& slot : slots) {
      if (below(4) == 0) operation->order.push_back({&slot, below(2) == 0});
    }
    operation->cancelled = below(20) == 0;
    ends[operation] = 0;
  }
  const auto end = [&](AttendOperation* operation) {
    ++ends.at(operation);
    ++ended;
  };
  std::vector<std::thread> lanes;
  for (int i = 0; i < 4; ++i) {
    lanes.emplace_back([&, lane_seed = random()] {
      std::mt19937 lane_random(lane_seed);
      Batch batch;
      while (batcher.Take(&batch)) {
        checker.Start(batch);
        std::this_thread::yield();
        while (batch.operations.size() > 1 && lane_random() % 8 == 0) {
          AttendOperation* const last = batch.operations.back();
          batch.operations.pop_back();
          checker.Stop(last);
          EXPECT_EQ(batcher.Return({&last, 1}), absl::OkStatus());
        }
        checker.End(batch);
        if (!batch.operations.empty()) batcher.Release(batch);
        for (AttendOperation* operation : batch.operations) end(operation);
        for (auto& [operation, status] : batch.dropped) end(operation);
      }
    });
  }
  for (const std::unique_ptr<AttendOperation>& operation : operations_) {
    while (below(8) != 0 && batcher.depth() >= 40) std::this_thread::yield();  // refuse some only
    checker.Arrive(operation.get(), [&] {
      AttendOperation* displaced = nullptr;
      const bool queued = batcher.Enqueue(operation.get(), &displaced).ok();
      if (!queued) end(operation.get());
      if (displaced != nullptr) end(displaced);
      return std::make_pair(queued, displaced);
    });
    if (below(50) == 0) batcher.Wake();
  }
  batcher.Close();
  for (std::thread& lane : lanes) lane.join();
  EXPECT_EQ(ended, kRequests);
  for (const auto& [operation, count] : ends) EXPECT_EQ(count, 1);
  for (const OrderSlot& slot : slots) {
    EXPECT_EQ(slot.oldest, nullptr);
    EXPECT_EQ(slot.running, 0);
  }
}

}  // namespace
}  // namespace flashcore::server
