// Operations that an idle lane stages before they are queued.
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/batcher_fixture.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class BatcherStagingTest : public BatcherTest {
 protected:
  AttendOperation* MakeAt(OrderSlot* slot, bool appends) {
    AttendOperation* const operation = Make("x");
    operation->order = {{slot, appends}};
    return operation;
  }

  OrderSlot slot_;
  Batcher batcher_{kOneByOne, &clock_};
};

TEST_F(BatcherStagingTest, OneIsStagedAtATimeWhileNothingIsQueued) {
  AttendOperation* const first = Make("x");
  EXPECT_TRUE(batcher_.MayStage());
  ASSERT_TRUE(batcher_.BeginStaging(first));
  EXPECT_FALSE(batcher_.MayStage());
  EXPECT_FALSE(batcher_.BeginStaging(Make("y")));
  batcher_.EndStaging(first, /*launched=*/false);
  EXPECT_TRUE(batcher_.MayStage());
  Add(&batcher_, "z");
  EXPECT_FALSE(batcher_.BeginStaging(first)) << "the lane is needed";
}

TEST_F(BatcherStagingTest, ItRunsAsIfItHadBeenTaken) {
  AttendOperation* const staged = MakeAt(&slot_, kAppends);
  ASSERT_TRUE(batcher_.BeginStaging(staged));
  batcher_.EndStaging(staged, /*launched=*/true);
  AttendOperation* const next = Add(&batcher_, "x", {{&slot_, kAppends}});
  EXPECT_THAT(TakeOperations(&batcher_), IsEmpty()) << "`staged` has not ended";
  batcher_.Release({&staged, 1});
  EXPECT_THAT(TakeOperations(&batcher_), ElementsAre(next));
}

TEST_F(BatcherStagingTest, ItWaitsForThoseThatRun) {
  Add(&batcher_, "x", {{&slot_, kAppends}});
  const Batch running = Take(&batcher_);
  AttendOperation* const staged = MakeAt(&slot_, kAppends);
  EXPECT_FALSE(batcher_.BeginStaging(staged));
  batcher_.Release(running);
  EXPECT_TRUE(batcher_.BeginStaging(staged));
}

TEST_F(BatcherStagingTest, OneThatIsGivenUpLeavesNoTrace) {
  AttendOperation* const staged = MakeAt(&slot_, kAppends);
  ASSERT_TRUE(batcher_.BeginStaging(staged));
  AttendOperation* const other = Add(&batcher_, "y", {{&slot_, kAppends}});
  EXPECT_THAT(TakeOperations(&batcher_), IsEmpty());
  batcher_.EndStaging(staged, /*launched=*/false);
  EXPECT_THAT(TakeOperations(&batcher_), ElementsAre(other));
}

TEST_F(BatcherStagingTest, ItGivesWayToAnOperationThatNoLaneTakes) {
  AttendOperation* const staged = Make("x");
  ASSERT_TRUE(batcher_.BeginStaging(staged));
  EXPECT_FALSE(batcher_.StagingMustEnd());
  Add(&batcher_, "y");
  EXPECT_TRUE(batcher_.StagingMustEnd());
  Batch batch;
  ASSERT_TRUE(batcher_.Take(&batch));  // another lane, which has ended its launch
  EXPECT_FALSE(batcher_.StagingMustEnd());
  Add(&batcher_, "y");
  EXPECT_TRUE(batcher_.StagingMustEnd());
}

TEST_F(BatcherStagingTest, AnIdleLaneTakesWhatComes) {
  AttendOperation* const staged = Make("x");
  ASSERT_TRUE(batcher_.BeginStaging(staged));
  Batch taken;
  std::thread idle([&] { ASSERT_TRUE(batcher_.Take(&taken)); });
  AttendOperation* const other = Add(&batcher_, "y");
  idle.join();
  EXPECT_THAT(taken.operations, ElementsAre(other));
  EXPECT_FALSE(batcher_.StagingMustEnd());
}

// It came later than `staged`, but its inputs are there.
TEST_F(BatcherStagingTest, ItGivesWayToAnOperationOnItsSlot) {
  AttendOperation* const staged = MakeAt(&slot_, kAppends);
  ASSERT_TRUE(batcher_.BeginStaging(staged));
  Batch taken;
  std::thread idle([&] {
    while (taken.operations.empty()) ASSERT_TRUE(batcher_.Take(&taken));
  });
  AttendOperation* const other = Add(&batcher_, "y", {{&slot_, kAppends}});
  EXPECT_TRUE(batcher_.StagingMustEnd());
  batcher_.EndStaging(staged, /*launched=*/false);
  idle.join();
  EXPECT_THAT(taken.operations, ElementsAre(other));
  EXPECT_FALSE(batcher_.StagingMustEnd());
}

TEST_F(BatcherStagingTest, ItsClientIsChargedOnceItIsLaunched) {
  for (const bool launched : {false, true}) {
    Batcher batcher(kOneByOne, &clock_);
    AttendOperation* const staged = Make("x", /*rows=*/2);
    ASSERT_TRUE(batcher.BeginStaging(staged));
    AttendOperation* const first_of_y = Add(&batcher, "y");
    AttendOperation* const second_of_y = Add(&batcher, "y");
    batcher.EndStaging(staged, launched);
    AttendOperation* const of_x = Add(&batcher, "x");
    EXPECT_THAT(TakeOperations(&batcher), ElementsAre(first_of_y));
    EXPECT_THAT(TakeOperations(&batcher), ElementsAre(launched ? second_of_y : of_x));
  }
}

TEST_F(BatcherStagingTest, TheEndOfTheBatcherEndsIt) {
  AttendOperation* const staged = Make("x");
  ASSERT_TRUE(batcher_.BeginStaging(staged));
  batcher_.Close();
  EXPECT_TRUE(batcher_.StagingMustEnd());
  batcher_.EndStaging(staged, /*launched=*/false);
  EXPECT_FALSE(batcher_.BeginStaging(staged));
}

// The next one can be staged while a staged one runs.
TEST_F(BatcherStagingTest, AnIdleLaneIsWokenForTheNext) {
  AttendOperation* const staged = Make("x");
  ASSERT_TRUE(batcher_.BeginStaging(staged));
  Batch taken;
  std::thread idle([&] { ASSERT_TRUE(batcher_.Take(&taken)); });
  batcher_.EndStaging(staged, /*launched=*/true);
  idle.join();
  EXPECT_THAT(taken.operations, IsEmpty());
}

}  // namespace
}  // namespace flashcore::server
