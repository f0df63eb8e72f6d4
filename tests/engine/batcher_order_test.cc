// The order of operations on the same layer of a sequence.
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/kv/operation.h"
#include "tests/engine/batcher_fixture.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

TEST_F(BatcherTest, OneBatchTakesOperationsOnASlotInTheirOrder) {
  OrderSlot slot;
  Batcher batcher({}, &clock_);
  AttendOperation* append1 = Add(&batcher, "x", {{&slot, kAppends}});
  AttendOperation* read = Add(&batcher, "x", {{&slot, kReads}});
  AttendOperation* append2 = Add(&batcher, "x", {{&slot, kAppends}});
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(append1, read, append2));
}

TEST_F(BatcherTest, BatchesTakeOperationsOnASlotInTheirOrder) {
  OrderSlot slot;
  Batcher batcher(kOneByOne, &clock_);
  const Operations operations = {Add(&batcher, "x", {{&slot, kAppends}}),
                                 Add(&batcher, "y", {{&slot, kReads}}),
                                 Add(&batcher, "z", {{&slot, kAppends}})};
  for (AttendOperation* operation : operations) {
    const Batch batch = Take(&batcher);
    EXPECT_THAT(batch.operations, ElementsAre(operation));
    EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
    EXPECT_EQ(retry_, kNoDeadline);
    batcher.Release(batch);
  }
  EXPECT_EQ(batcher.depth(), 0);
}

TEST_F(BatcherTest, AWriterWaitsForAllReadersAndHoldsBackThoseBehindIt) {
  OrderSlot slot;
  Batcher batcher(kOneByOne, &clock_);
  AttendOperation* read1 = Add(&batcher, "x", {{&slot, kReads}});
  AttendOperation* read2 = Add(&batcher, "y", {{&slot, kReads}});
  const Batch first = Take(&batcher);
  const Batch second = Take(&batcher);  // beside the first
  EXPECT_THAT(first.operations, ElementsAre(read1));
  EXPECT_THAT(second.operations, ElementsAre(read2));

  AttendOperation* append = Add(&batcher, "x", {{&slot, kAppends}});
  AttendOperation* read3 = Add(&batcher, "y", {{&slot, kReads}});
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
  batcher.Release(second);
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
  batcher.Release(first);
  const Batch third = Take(&batcher);
  EXPECT_THAT(third.operations, ElementsAre(append));
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
  batcher.Release(third);
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(read3));
}

TEST_F(BatcherTest, AReadMayJoinReadersOfAnotherBatchButAnAppendBehindItMayNot) {
  OrderSlot slot;
  Batcher batcher({}, &clock_);
  Add(&batcher, "x", {{&slot, kReads}});
  const Batch first = Take(&batcher);
  AttendOperation* read = Add(&batcher, "x", {{&slot, kReads}});
  AttendOperation* append = Add(&batcher, "x", {{&slot, kAppends}});
  const Batch second = Take(&batcher);
  EXPECT_THAT(second.operations, ElementsAre(read));
  batcher.Release(first);
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
  batcher.Release(second);
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(append));
}

TEST_F(BatcherTest, ABlockedOperationBlocksNobodyElse) {
  OrderSlot slot, other;
  Batcher batcher({}, &clock_);
  Add(&batcher, "x", {{&slot, kAppends}});
  const Batch first = Take(&batcher);
  AttendOperation* blocked = Add(&batcher, "x", {{&slot, kAppends}});
  AttendOperation* same_client = Add(&batcher, "x", {{&other, kAppends}});
  AttendOperation* other_client = Add(&batcher, "y", 1, 64);
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(same_client, other_client));
  batcher.Release(first);
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(blocked));
}

TEST_F(BatcherTest, ABlockedOperationDoesNotDecideTheGeometry) {
  OrderSlot slot;
  Batcher batcher({}, &clock_);
  Add(&batcher, "x", {{&slot, kAppends}});
  const Batch first = Take(&batcher);
  Add(&batcher, "x", {{&slot, kReads}});
  AttendOperation* other_geometry = Add(&batcher, "x", 1, 128);
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(other_geometry));
}

TEST_F(BatcherTest, NothingPassesAnOperationThatDoesNotMatch) {
  OrderSlot slot;
  Batcher batcher({}, &clock_);
  AttendOperation* leader = Add(&batcher, "x", 1, 64);
  AttendOperation* other_geometry = Make("y", 1, 128);
  other_geometry->order = {{&slot, kAppends}};
  Add(&batcher, other_geometry);
  AttendOperation* behind_it = Add(&batcher, "z", {{&slot, kReads}});
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(leader));
  const Batch second = Take(&batcher);
  EXPECT_THAT(second.operations, ElementsAre(other_geometry));
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
  batcher.Release(second);
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(behind_it));
}

TEST_F(BatcherTest, OperationsOnManySlotsWaitForAllOfThem) {
  std::vector<OrderSlot> slots(256);
  const auto all = [&slots](bool appends) {
    std::vector<OrderedUse> uses;
    for (OrderSlot& slot : slots) uses.push_back({&slot, appends});
    return uses;
  };
  Batcher batcher(kOneByOne, &clock_);
  AttendOperation* one = Add(&batcher, "x", {{&slots[255], kReads}});
  AttendOperation* append = Add(&batcher, "y", all(kAppends));
  AttendOperation* read = Add(&batcher, "z", all(kReads));
  for (AttendOperation* operation : {one, append, read}) {
    const Batch batch = Take(&batcher);
    EXPECT_THAT(batch.operations, ElementsAre(operation));
    EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
    batcher.Release(batch);
  }
}

TEST_F(BatcherTest, CrossedSlotsDoNotDeadlock) {
  OrderSlot a, b;
  Batcher batcher(kOneByOne, &clock_);
  AttendOperation* ab = Add(&batcher, "x", {{&a, kAppends}, {&b, kReads}});
  AttendOperation* ba = Add(&batcher, "y", {{&b, kAppends}, {&a, kReads}});
  AttendOperation* ab2 = Add(&batcher, "z", {{&a, kAppends}, {&b, kAppends}});
  for (AttendOperation* operation : {ab, ba, ab2}) {
    const Batch batch = Take(&batcher);
    EXPECT_THAT(batch.operations, ElementsAre(operation));
    EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
    batcher.Release(batch);
  }
}

TEST_F(BatcherTest, ADeadOperationIsDroppedFromWhereverItWaits) {
  OrderSlot slot;
  Batcher batcher(kOneByOne, &clock_);
  Add(&batcher, "x", {{&slot, kReads}});
  const Batch reader = Take(&batcher);
  AttendOperation* append = Add(&batcher, "x", {{&slot, kAppends}});
  AttendOperation* read = Add(&batcher, "y", {{&slot, kReads}});
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
  append->cancelled = true;  // the oldest, and blocked
  const Batch dropping = Take(&batcher);
  EXPECT_THAT(dropping.dropped, ElementsAre(Pair(append, ::testing::_)));
  EXPECT_THAT(dropping.operations, ElementsAre(read));  // no longer behind an append

  AttendOperation* append1 = Add(&batcher, "x", {{&slot, kAppends}});
  AttendOperation* append2 = Add(&batcher, "y", {{&slot, kAppends}});
  append2->cancelled = true;  // the youngest
  const Batch dropping_again = Take(&batcher);
  EXPECT_THAT(dropping_again.dropped, ElementsAre(Pair(append2, ::testing::_)));
  EXPECT_THAT(dropping_again.operations, IsEmpty());
  batcher.Release(reader);
  batcher.Release(dropping);
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(append1));
}

}  // namespace
}  // namespace flashcore::server
