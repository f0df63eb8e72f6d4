#include "server/engine/batcher.h"

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/kv/cut_launch.h"
#include "server/kv/operation.h"
#include "tests/base/has_info.h"
#include "tests/engine/batcher_fixture.h"

namespace flashcore::server {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::SizeIs;

// ---- Batches.

TEST_F(BatcherTest, TakesRequestsOfOneGeometryTogetherInOrder) {
  Batcher batcher({10, 10, 100}, &clock_);
  AttendOperation* a = Add(&batcher, "x", 1, 64);
  AttendOperation* b = Add(&batcher, "x", 1, 128);
  AttendOperation* c = Add(&batcher, "x", 2, 64);
  AttendOperation* d = Add(&batcher, "x", 1, 128);
  EXPECT_EQ(batcher.depth(), 4);
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(a, c));
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(b, d));
  EXPECT_EQ(batcher.depth(), 0);
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
  EXPECT_EQ(retry_, kNoDeadline);
}

TEST_F(BatcherTest, OverInt8RequestsOfOnePrecisionAreTakenTogether) {
  using kernels::KvDType;
  using kernels::Precision;
  const auto add = [&](Batcher* batcher, KvDType kv_dtype, Precision precision) {
    AttendOperation* operation = Make("x");
    operation->request.kv_dtype = kv_dtype;
    operation->request.precision = precision;
    return Add(batcher, operation);
  };
  Batcher batcher({10, 10, 100}, &clock_);
  AttendOperation* a = add(&batcher, KvDType::kInt8, Precision::k16Bit);
  AttendOperation* b = add(&batcher, KvDType::kInt8, Precision::kInt8Qk);
  AttendOperation* c = add(&batcher, KvDType::kInt8, Precision::kInt8QkPv);
  AttendOperation* d = add(&batcher, KvDType::kInt8, Precision::kInt8Qk);
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(a));
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(b, d));
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(c));
  // All other K/V has kernels of one precision.
  for (const KvDType kv_dtype : {KvDType::kSameAsQuery, KvDType::kFloat8E4M3}) {
    a = add(&batcher, kv_dtype, Precision::kInt8QkPv);
    b = add(&batcher, kv_dtype, Precision::k16Bit);
    c = add(&batcher, kv_dtype, Precision::kInt8Qk);
    EXPECT_THAT(TakeOperations(&batcher), ElementsAre(a, b, c));
  }
}

TEST_F(BatcherTest, RespectsTheBatchLimits) {
  Batcher batcher({10, 2, 10}, &clock_);
  AttendOperation* a = Add(&batcher, "x", 6);
  AttendOperation* b = Add(&batcher, "x", 5);   // too many rows beside a
  AttendOperation* c = Add(&batcher, "x", 4);   // fits
  AttendOperation* d = Add(&batcher, "x", 1);   // a third request
  AttendOperation* e = Add(&batcher, "x", 50);  // more than a batch, but must be served
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(a, c));
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(b, d));
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(e));
}

TEST_F(BatcherTest, CountsQueryRowsOrRowsToAppend) {
  const auto tokens = [this](std::vector<SpanShape> spans) {
    Batcher batcher({}, &clock_);
    AttendOperation* operation = Make("x");
    operation->request.spans = std::move(spans);
    return Add(&batcher, operation)->tokens;
  };
  const auto inline_kv = [](uint32_t query_rows, uint32_t kv_rows) {
    return SpanShape{query_rows, kv_rows, "", {}};
  };
  const auto resident = [](uint32_t query_rows, uint32_t kv_rows) {
    return SpanShape{query_rows, kv_rows, "id", {}};
  };
  EXPECT_EQ(tokens({inline_kv(3, 500)}), 3);
  EXPECT_EQ(tokens({inline_kv(3, 500), inline_kv(4, 0)}), 7);
  EXPECT_EQ(tokens({resident(0, 500)}), 500);
  EXPECT_EQ(tokens({resident(3, 0), resident(4, 0)}), 7);
  EXPECT_EQ(tokens({resident(3, 5), resident(0, 5), inline_kv(3, 500)}), 10);
  EXPECT_EQ(tokens({inline_kv(0, 500)}), 1);
}

TEST_F(BatcherTest, ExpiredAndCancelledAreNeverLaunched) {
  Batcher batcher({10, 10, 100}, &clock_);
  AttendOperation* expired = Add(&batcher, "x");
  expired->deadline = clock_.Now() + milliseconds(5);
  AttendOperation* cancelled = Add(&batcher, "x");
  cancelled->cancelled = true;
  AttendOperation* alive = Add(&batcher, "x");
  alive->deadline = clock_.Now() + milliseconds(6);
  clock_.Advance(milliseconds(5));
  const Batch batch = Take(&batcher);
  EXPECT_THAT(batch.operations, ElementsAre(alive));
  ASSERT_THAT(batch.dropped, SizeIs(2));
  EXPECT_EQ(batch.dropped[0].first, expired);
  EXPECT_EQ(batch.dropped[0].second.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(batch.dropped[0].second.message()), HasSubstr("after 5000 us"));
  EXPECT_EQ(batch.dropped[1].first, cancelled);
  EXPECT_EQ(batch.dropped[1].second.code(), absl::StatusCode::kCancelled);
}

TEST_F(BatcherTest, HandsOutDroppedEvenIfNothingIsLeft) {
  Batcher batcher({10, 10, 100}, &clock_);
  AttendOperation* cancelled = Add(&batcher, "x");
  cancelled->cancelled = true;
  Batch batch;
  ASSERT_TRUE(batcher.Take(&batch));
  EXPECT_THAT(batch.operations, IsEmpty());
  EXPECT_THAT(batch.dropped, ElementsAre(Pair(cancelled, ::testing::_)));
  EXPECT_EQ(batcher.depth(), 0);
  EXPECT_EQ(batcher.clients(), 0u);
}

// ---- Fairness between clients.

TEST_F(BatcherTest, ClientsJoinABatchInTurn) {
  Batcher batcher({10, 5, 100}, &clock_);
  AttendOperation* x1 = Add(&batcher, "x");
  AttendOperation* x2 = Add(&batcher, "x");
  AttendOperation* x3 = Add(&batcher, "x");
  AttendOperation* x4 = Add(&batcher, "x");
  AttendOperation* y1 = Add(&batcher, "y");
  AttendOperation* y2 = Add(&batcher, "y");
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(x1, y1, x2, y2, x3));
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(x4));
}

TEST_F(BatcherTest, LeastServedClientDecidesTheGeometry) {
  Batcher batcher({10, 10, 100}, &clock_);
  AttendOperation* x1 = Add(&batcher, "x", 3, 64);
  AttendOperation* x2 = Add(&batcher, "x", 1, 128);
  AttendOperation* y1 = Add(&batcher, "y", 1, 128);
  AttendOperation* y2 = Add(&batcher, "y", 1, 64);
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(x1, y2));
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(y1, x2));
}

TEST_F(BatcherTest, BigPrefillsAndSmallDecodesGetEqualService) {
  Batcher batcher(kOneByOne, &clock_);
  std::map<std::string, int64_t> served;
  for (int i = 0; i < 5; ++i) Add(&batcher, "prefill", 100);
  for (int i = 0; i < 500; ++i) Add(&batcher, "decode", 1);
  while (batcher.depth() > 0) {
    const AttendOperation* operation = TakeOperations(&batcher).front();
    served[operation->identity.name] += operation->tokens;
    ASSERT_LE(std::abs(served["prefill"] - served["decode"]), 100);
  }
}

TEST_F(BatcherTest, DecodesRideAlongWithPrefills) {
  Batcher batcher({100, 8, 128}, &clock_);
  for (int i = 0; i < 20; ++i) Add(&batcher, "prefill", 100);
  for (int i = 0; i < 20; ++i) {
    AttendOperation* decode = Add(&batcher, "decode", 1);
    EXPECT_THAT(TakeOperations(&batcher), ::testing::Contains(decode)) << i;
  }
}

TEST_F(BatcherTest, IdlenessEarnsNothing) {
  Batcher batcher(kOneByOne, &clock_);
  for (int i = 0; i < 100; ++i) Add(&batcher, "busy");
  for (int i = 0; i < 50; ++i) TakeOperations(&batcher);
  for (int i = 0; i < 50; ++i) Add(&batcher, "late");
  std::map<std::string, int> served;
  for (int i = 0; i < 10; ++i) ++served[TakeOperations(&batcher).front()->identity.name];
  EXPECT_THAT(served, ElementsAre(Pair("busy", 5), Pair("late", 5)));
}

TEST_F(BatcherTest, ComingBackDoesNotUndoWhatAClientWasServed) {
  Batcher batcher(kOneByOne, &clock_);
  Add(&batcher, "prefill", 10);
  for (int i = 0; i < 30; ++i) Add(&batcher, "decode");
  std::map<std::string, int64_t> served;
  for (int i = 0; i < 22; ++i) {
    const AttendOperation* operation = TakeOperations(&batcher).front();
    served[operation->identity.name] += operation->tokens;
    if (operation->identity.name == "prefill") Add(&batcher, "prefill", 10);  // never two at a time
  }
  EXPECT_THAT(served, ElementsAre(Pair("decode", 20), Pair("prefill", 20)));
}

TEST_F(BatcherTest, ClientsAreEqualAgainOnceTheQueueWasEmpty) {
  Batcher batcher(kOneByOne, &clock_);
  Add(&batcher, "x", 1000);
  TakeOperations(&batcher);
  AttendOperation* x = Add(&batcher, "x");
  AttendOperation* y = Add(&batcher, "y");
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(x));
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(y));
}

TEST_F(BatcherTest, ForgetsClientsThatHaveNothingWaiting) {
  Batcher batcher({50, 2}, &clock_);
  for (int i = 0; i < 49; ++i) Add(&batcher, "steady");
  for (int i = 0; i < 1000; ++i) {
    Add(&batcher, absl::StrCat("passing ", i), /*rows=*/1 + i % 100);
    const Operations taken = TakeOperations(&batcher);
    for (const AttendOperation* operation : taken) {
      if (operation->identity.name == "steady") Add(&batcher, "steady");
    }
    ASSERT_LE(batcher.clients(), 100u);
  }
  while (!TakeOperations(&batcher).empty()) continue;
  EXPECT_EQ(batcher.clients(), 0u);
}

TEST_F(BatcherTest, RemembersNoMoreIdleClientsThanMayWait) {
  OrderSlot slot;
  Batcher batcher({3, 1}, &clock_);
  Add(&batcher, "x", {{&slot, kAppends}});
  const Batch first = Take(&batcher);
  Add(&batcher, "y", {{&slot, kAppends}});  // blocked, so nobody is served less
  for (int i = 0; i < 20; ++i) {
    AttendOperation* passing = Add(&batcher, absl::StrCat("passing ", i));
    EXPECT_THAT(TakeOperations(&batcher), ElementsAre(passing));
    EXPECT_LE(batcher.clients(), 1u + 3u);
  }
}

// ---- A full queue.

TEST_F(BatcherTest, RefusesWhenFull) {
  Batcher batcher({2, 10, 100}, &clock_);
  Add(&batcher, "x");
  Add(&batcher, "x");
  AttendOperation* displaced = nullptr;
  const absl::Status status = batcher.Enqueue(Make("x"), &displaced);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("queue is full: 2"));
  EXPECT_THAT(status, testing::HasInfo("QUEUE_FULL"));
  EXPECT_EQ(displaced, nullptr);
  EXPECT_EQ(batcher.depth(), 2);
}

TEST_F(BatcherTest, ANewcomerDisplacesTheYoungestOfTheLongestUntilTheyHaveAlike) {
  Batcher batcher({6, 10, 100}, &clock_);
  Operations x;
  for (int i = 0; i < 4; ++i) x.push_back(Add(&batcher, "x"));
  AttendOperation* y1 = Add(&batcher, "y");
  AttendOperation* y2 = Add(&batcher, "y");
  AttendOperation* z1 = Make("z");
  AttendOperation* z2 = Make("z");
  AttendOperation* displaced = nullptr;
  EXPECT_EQ(batcher.Enqueue(z1, &displaced), absl::OkStatus());
  EXPECT_EQ(displaced, x[3]);
  EXPECT_EQ(batcher.Enqueue(z2, &displaced), absl::OkStatus());
  EXPECT_EQ(displaced, x[2]);
  // Now each has two, and a third would be more than its share.
  EXPECT_EQ(batcher.Enqueue(Make("z"), &displaced).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(displaced, nullptr);
  // A newcomer with one has less than that.
  AttendOperation* w = Make("w");
  EXPECT_EQ(batcher.Enqueue(w, &displaced), absl::OkStatus());
  EXPECT_EQ(displaced, x[1]);
  EXPECT_EQ(batcher.depth(), 6);
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(x[0], y1, z1, w, y2, z2));
}

TEST_F(BatcherTest, OneMoreIsNotEnoughToBeDisplaced) {
  Batcher batcher({3, 10, 100}, &clock_);
  for (const char* client : {"x", "x", "y"}) Add(&batcher, client);
  AttendOperation* displaced = nullptr;
  // y would have as many as x.
  EXPECT_EQ(batcher.Enqueue(Make("y"), &displaced).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(displaced, nullptr);
}

TEST_F(BatcherTest, ADisplacedOperationIsInNobodysWay) {
  OrderSlot slot;
  Batcher batcher({2, 10, 100}, &clock_);
  AttendOperation* x1 = Add(&batcher, "x");
  AttendOperation* x2 = Add(&batcher, "x", {{&slot, kAppends}});
  AttendOperation* y = Make("y");
  y->order = {{&slot, kReads}};
  AttendOperation* displaced = nullptr;
  EXPECT_EQ(batcher.Enqueue(y, &displaced), absl::OkStatus());
  EXPECT_EQ(displaced, x2);
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(x1, y));
}

// Its launch stays open, with rows appended: it can only end by itself.
TEST_F(BatcherTest, WhatHasBegunIsNotDisplaced) {
  OrderSlot slot;
  Batcher batcher({2, 10, 100}, &clock_);
  AttendOperation* running = Add(&batcher, "w", {{&slot, kAppends}});
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(running));
  AttendOperation* waits = Add(&batcher, "x", {{&slot, kReads}});
  AttendOperation* begun = Add(&batcher, "x");
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(begun));
  begun->cut = std::make_shared<CutLaunch>();
  EXPECT_EQ(batcher.Return({&begun, 1}), absl::OkStatus());
  AttendOperation* y = Make("y");
  AttendOperation* displaced = nullptr;
  EXPECT_EQ(batcher.Enqueue(y, &displaced), absl::OkStatus());
  EXPECT_EQ(displaced, waits) << "although it came before";
  // All that is left of x has begun.
  AttendOperation* begun_too = Make("x");
  batcher.EndAll(absl::UnavailableError("the end"));
  Batcher next({2, 10, 100}, &clock_);
  for (AttendOperation* operation : {begun, begun_too}) {
    Add(&next, operation)->cut = std::make_shared<CutLaunch>();
  }
  EXPECT_EQ(next.Enqueue(Make("y"), &displaced).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(displaced, nullptr);
}

// ---- Work.

TEST_F(BatcherTest, ABatchHasAtMostTheWorkOfALaunch) {
  Batcher::Options options;
  options.max_launch = 10 * kRowWork;
  Batcher batcher(options, &clock_);
  AttendOperation* a = Add(&batcher, "x", 6);
  EXPECT_EQ(a->work, 6 * kRowWork);
  AttendOperation* b = Add(&batcher, "x", 5);
  AttendOperation* c = Add(&batcher, "x", 4);
  AttendOperation* d = Add(&batcher, "x", 50);
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(a, c));
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(b));
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(d));
}

TEST_F(BatcherTest, WorkIsThatOfVisibleKvAndOfResidentKv) {
  Batcher batcher({}, &clock_);
  AttendOperation* all = Add(&batcher, "x", 4);
  AttendOperation* window = Make("x", 4);
  window->request.terms.mask = kernels::Mask::SlidingWindow(624, 0);
  Add(&batcher, window);
  EXPECT_LT(window->work, all->work / 2);
  AttendOperation* resident = Make("x", 4);
  resident->request.spans[0].sequence_id = "id";
  resident->sequence_lengths = {62500};
  Add(&batcher, resident);
  EXPECT_EQ(resident->work, 2 * all->work);
  AttendOperation* append = Make("x", 0);
  append->request.append_only = true;
  Add(&batcher, append);
  EXPECT_GT(append->work, Nanoseconds(1)) << "it moves bytes";
}

// As an operation whose launch has more parts.
TEST_F(BatcherTest, ABegunOperationIsTakenAloneInItsClientsTurn) {
  OrderSlot slot;
  Batcher::Options options;
  options.max_launch = 2 * kRowWork;
  Batcher batcher(options, &clock_);
  AttendOperation* begun = Make("x", 10);
  begun->order = {{&slot, kAppends}};
  Add(&batcher, begun);
  AttendOperation* x = Add(&batcher, "x");
  const Batch batch = Take(&batcher);
  EXPECT_THAT(batch.operations, ElementsAre(begun));
  begun->cut = std::make_shared<CutLaunch>();
  AttendOperation* behind_it = Add(&batcher, "y", {{&slot, kReads}});
  EXPECT_EQ(batcher.Return({&begun, 1}), absl::OkStatus());
  EXPECT_EQ(batcher.depth(), 3);
  AttendOperation* z = Add(&batcher, "z");
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(z, x)) << "z was not served more";
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(begun));
  EXPECT_EQ(batcher.Return({&begun, 1}), absl::OkStatus());
  begun->cancelled = true;
  const Batch dropping = Take(&batcher);
  EXPECT_THAT(dropping.operations, IsEmpty()) << "it still holds its slot";
  EXPECT_THAT(dropping.dropped, ElementsAre(Pair(begun, ::testing::_)));
  batcher.Release({&begun, 1});
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(behind_it));
}

TEST_F(BatcherTest, OperationsThatAreReturnedKeepTheirPlaces) {
  OrderSlot slot;
  Batcher batcher({}, &clock_);
  AttendOperation* append = Add(&batcher, "x", {{&slot, kAppends}});
  AttendOperation* read = Add(&batcher, "y", {{&slot, kReads}});
  AttendOperation* append2 = Add(&batcher, "x", {{&slot, kAppends}});
  Batch batch = Take(&batcher);
  EXPECT_THAT(batch.operations, ElementsAre(append, read, append2));
  AttendOperation* append3 = Add(&batcher, "z", {{&slot, kAppends}});
  EXPECT_EQ(batcher.Return(absl::MakeSpan(batch.operations).subspan(1)), absl::OkStatus());
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty()) << "the first append runs";
  batcher.Release({&append, 1});
  for (AttendOperation* operation : {read, append2, append3}) {
    const Batch next = Take(&batcher);
    EXPECT_THAT(next.operations, ElementsAre(operation));
    batcher.Release(next);
  }
}

TEST_F(BatcherTest, EndAllTakesEverythingAndLetsNothingBack) {
  OrderSlot slot;
  Batcher batcher({}, &clock_);
  AttendOperation* running = Add(&batcher, "x", {{&slot, kAppends}});
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(running));
  AttendOperation* waiting = Add(&batcher, "y", {{&slot, kAppends}});
  const absl::Status end = absl::UnavailableError("the end");
  EXPECT_THAT(batcher.EndAll(end), ElementsAre(waiting));
  EXPECT_EQ(batcher.depth(), 0);
  EXPECT_EQ(slot.oldest, nullptr);
  EXPECT_EQ(batcher.Return({&running, 1}), end);
  AttendOperation* displaced = nullptr;
  EXPECT_EQ(batcher.Enqueue(Make("x"), &displaced).code(), absl::StatusCode::kUnavailable);
  Batch batch;
  EXPECT_FALSE(batcher.Take(&batch));
}

// ---- The queue delay.

TEST_F(BatcherTest, WaitsForCompanyUntilTheOldestHasWaitedEnough) {
  Batcher batcher(kWithDelay, &clock_);
  AttendOperation* a = Add(&batcher, "x");
  const TimePoint due = clock_.Now() + milliseconds(5);
  clock_.Advance(milliseconds(3));
  AttendOperation* b = Add(&batcher, "y");
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
  EXPECT_EQ(retry_, due);
  EXPECT_EQ(batcher.depth(), 2);
  clock_.Advance(milliseconds(2));
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(a, b));
}

TEST_F(BatcherTest, AFullBatchDoesNotWait) {
  Batcher batcher(kWithDelay, &clock_);
  AttendOperation* a = Add(&batcher, "x");
  AttendOperation* b = Add(&batcher, "x");
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
  AttendOperation* c = Add(&batcher, "x");
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(a, b, c));

  AttendOperation* d = Add(&batcher, "x", 6);
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
  AttendOperation* e = Add(&batcher, "x", 5);  // one token too many
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(d));
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
  AttendOperation* f = Add(&batcher, "x", 5);  // no room for more
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(e, f));
}

TEST_F(BatcherTest, NobodyWaitsLongerBecauseAnotherClientGoesFirst) {
  OrderSlot slot;
  Batcher batcher(kWithDelay, &clock_);
  Add(&batcher, "x", {{&slot, kAppends}});
  clock_.Advance(milliseconds(5));
  const Batch first = Take(&batcher);
  Add(&batcher, "y", {{&slot, kAppends}});  // blocked, so y stays the least served
  AttendOperation* x1 = Add(&batcher, "x", 1, 64);
  clock_.Advance(milliseconds(5));
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(x1));
  AttendOperation* x2 = Add(&batcher, "x", 1, 128);
  clock_.Advance(milliseconds(4));
  AttendOperation* y = Add(&batcher, "y", 1, 64);
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
  clock_.Advance(milliseconds(1));  // x2 is due, y is not
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(y));
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(x2));
}

TEST_F(BatcherTest, LookingAtABatchThatIsNotDueChangesNothing) {
  OrderSlot slot;
  Batcher batcher({10, 5, 100, milliseconds(5)}, &clock_);
  Add(&batcher, "w", {{&slot, kReads}});
  clock_.Advance(milliseconds(5));
  const Batch first = Take(&batcher);
  const Operations operations = {Add(&batcher, "x", {{&slot, kReads}}), Add(&batcher, "y"),
                                 Add(&batcher, "y"), Add(&batcher, "x", {{&slot, kAppends}})};
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
  batcher.Release(first);
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty());  // now it had chosen the append, too
  EXPECT_EQ(slot.running, 0);
  clock_.Advance(milliseconds(5));
  EXPECT_THAT(TakeOperations(&batcher),
              ElementsAre(operations[0], operations[1], operations[3], operations[2]));
}

TEST_F(BatcherTest, AnAppendThatWasOnlyLookedAtIsInNobodysWay) {
  OrderSlot slot;
  Batcher batcher(kWithDelay, &clock_);
  AttendOperation* append = Add(&batcher, "x", {{&slot, kAppends}});
  AttendOperation* read = Add(&batcher, "y", {{&slot, kReads}});
  EXPECT_THAT(TakeOperations(&batcher), IsEmpty());
  append->cancelled = true;
  EXPECT_THAT(Take(&batcher).dropped, SizeIs(1));
  clock_.Advance(milliseconds(5));
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(read));
}

TEST_F(BatcherTest, DropsTheDeadWithoutDelay) {
  Batcher batcher(kWithDelay, &clock_);
  AttendOperation* dead = Add(&batcher, "x");
  dead->cancelled = true;
  AttendOperation* alive = Add(&batcher, "x");
  const Batch batch = Take(&batcher);
  EXPECT_THAT(batch.dropped, ElementsAre(Pair(dead, ::testing::_)));
  EXPECT_THAT(batch.operations, IsEmpty());
  clock_.Advance(milliseconds(5));
  EXPECT_THAT(TakeOperations(&batcher), ElementsAre(alive));
}

}  // namespace
}  // namespace flashcore::server
