#include "server/core/batcher.h"

#include <chrono>
#include <memory>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/core/fakes.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using testing::FakeClock;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MakeRequest;
using ::testing::Pair;

std::unique_ptr<AttendOperation> MakeOperation(uint32_t query_rows = 1, uint32_t head_dim = 64) {
  auto operation = std::make_unique<AttendOperation>();
  operation->request = MakeRequest(query_rows, 1, 2, 1, head_dim);
  return operation;
}

class BatcherTest : public ::testing::Test {
 protected:
  AttendOperation* Add(Batcher* batcher, std::unique_ptr<AttendOperation> operation) {
    EXPECT_EQ(batcher->Enqueue(operation.get()), absl::OkStatus());
    operations_.push_back(std::move(operation));
    return operations_.back().get();
  }

  FakeClock clock_;
  Batch batch_;
  std::vector<std::unique_ptr<AttendOperation>> operations_;
};

TEST_F(BatcherTest, TakesRequestsOfOneGeometryTogetherInOrder) {
  Batcher batcher({10, 10, 100}, &clock_);
  AttendOperation* a = Add(&batcher, MakeOperation(1, 64));
  AttendOperation* b = Add(&batcher, MakeOperation(1, 128));
  AttendOperation* c = Add(&batcher, MakeOperation(2, 64));
  AttendOperation* d = Add(&batcher, MakeOperation(1, 128));
  EXPECT_EQ(batcher.depth(), 4);
  ASSERT_TRUE(batcher.Take(&batch_));
  EXPECT_THAT(batch_.operations, ElementsAre(a, c));
  ASSERT_TRUE(batcher.Take(&batch_));
  EXPECT_THAT(batch_.operations, ElementsAre(b, d));
  EXPECT_EQ(batcher.depth(), 0);
}

TEST_F(BatcherTest, RespectsTheBatchLimits) {
  Batcher batcher({10, 2, 10}, &clock_);
  AttendOperation* a = Add(&batcher, MakeOperation(6));
  AttendOperation* b = Add(&batcher, MakeOperation(5));   // too many rows beside a
  AttendOperation* c = Add(&batcher, MakeOperation(4));   // fits
  AttendOperation* d = Add(&batcher, MakeOperation(1));   // a third request
  AttendOperation* e = Add(&batcher, MakeOperation(50));  // more than a batch, but must be served
  ASSERT_TRUE(batcher.Take(&batch_));
  EXPECT_THAT(batch_.operations, ElementsAre(a, c));
  ASSERT_TRUE(batcher.Take(&batch_));
  EXPECT_THAT(batch_.operations, ElementsAre(b, d));
  ASSERT_TRUE(batcher.Take(&batch_));
  EXPECT_THAT(batch_.operations, ElementsAre(e));
}

TEST_F(BatcherTest, RefusesWhenFull) {
  Batcher batcher({2, 10, 100}, &clock_);
  Add(&batcher, MakeOperation());
  Add(&batcher, MakeOperation());
  auto third = MakeOperation();
  const absl::Status status = batcher.Enqueue(third.get());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("queue is full: 2"));
  EXPECT_EQ(batcher.depth(), 2);
}

TEST_F(BatcherTest, ExpiredAndCancelledAreNeverLaunched) {
  Batcher batcher({10, 10, 100}, &clock_);
  AttendOperation* expired = Add(&batcher, MakeOperation());
  expired->deadline = clock_.Now() + std::chrono::milliseconds(5);
  AttendOperation* cancelled = Add(&batcher, MakeOperation());
  cancelled->cancelled = true;
  AttendOperation* alive = Add(&batcher, MakeOperation());
  alive->deadline = clock_.Now() + std::chrono::milliseconds(6);
  clock_.Advance(std::chrono::milliseconds(5));
  ASSERT_TRUE(batcher.Take(&batch_));
  EXPECT_THAT(batch_.operations, ElementsAre(alive));
  ASSERT_EQ(batch_.dropped.size(), 2u);
  EXPECT_EQ(batch_.dropped[0].first, expired);
  EXPECT_EQ(batch_.dropped[0].second.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(batch_.dropped[0].second.message()), HasSubstr("after 5000 us"));
  EXPECT_EQ(batch_.dropped[1].first, cancelled);
  EXPECT_EQ(batch_.dropped[1].second.code(), absl::StatusCode::kCancelled);
}

TEST_F(BatcherTest, HandsOutDroppedEvenIfNothingIsLeft) {
  Batcher batcher({10, 10, 100}, &clock_);
  AttendOperation* cancelled = Add(&batcher, MakeOperation());
  cancelled->cancelled = true;
  ASSERT_TRUE(batcher.Take(&batch_));
  EXPECT_THAT(batch_.operations, IsEmpty());
  EXPECT_THAT(batch_.dropped, ElementsAre(Pair(cancelled, ::testing::_)));
}

TEST_F(BatcherTest, CloseRunsOutTheQueue) {
  Batcher batcher({10, 1, 100}, &clock_);
  AttendOperation* a = Add(&batcher, MakeOperation());
  AttendOperation* b = Add(&batcher, MakeOperation());
  batcher.Close();
  auto late = MakeOperation();
  EXPECT_EQ(batcher.Enqueue(late.get()).code(), absl::StatusCode::kUnavailable);
  ASSERT_TRUE(batcher.Take(&batch_));
  EXPECT_THAT(batch_.operations, ElementsAre(a));
  ASSERT_TRUE(batcher.Take(&batch_));
  EXPECT_THAT(batch_.operations, ElementsAre(b));
  EXPECT_FALSE(batcher.Take(&batch_));
}

TEST_F(BatcherTest, ManyLanesTakeEveryRequestOnce) {
  Batcher batcher({100000, 3, 100}, &clock_);
  constexpr int kRequests = 3000;
  std::atomic<int> taken{0};
  std::vector<std::thread> lanes;
  for (int i = 0; i < 3; ++i) {
    lanes.emplace_back([&] {
      Batch batch;
      while (batcher.Take(&batch)) taken += static_cast<int>(batch.operations.size());
    });
  }
  for (int i = 0; i < kRequests; ++i) Add(&batcher, MakeOperation(1, i % 2 == 0 ? 64 : 128));
  batcher.Close();
  for (std::thread& lane : lanes) lane.join();
  EXPECT_EQ(taken, kRequests);
}

}  // namespace
}  // namespace flashcore::server
